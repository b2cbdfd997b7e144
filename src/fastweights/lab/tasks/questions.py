"""Questions that a language model answers by continuing a text: in-context recall and word
scrambling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.training.data.files import read_whole


@dataclass(frozen=True)
class Question:
    """A prompt for a language model and the answers that count as right.

    Attributes:
        text: The prompt, which the model continues.
        values: Right answers, any of which will do.
    """

    text: str
    values: tuple[str, ...]

    def has_value_in(self, answer: str) -> bool:
        """Whether `answer` contains one of the values, ignoring case (MesaNet, appendix J.2;
        lm-eval's swde)."""
        return any(value.lower() in answer.lower() for value in self.values)

    def exact(self, answer: str) -> bool:
        """Whether `answer` equals one of the values, ignoring the space around it (GPT-3's word
        scrambling)."""
        return answer.strip() in {value.strip() for value in self.values}


@dataclass(frozen=True)
class Answering:
    """The settings by which answers are generated, greedily.

    Attributes:
        context: Tokens of the prompt that are kept, the last ones.
        tokens: Most tokens of an answer.
        stop: Text before which an answer ends.
    """

    context: int = 2000
    tokens: int = 48
    stop: str = "\n"

    def cut(self, answer: str) -> str:
        """Return the part of `answer` before the first `stop`."""
        return answer.split(self.stop)[0]


RECALL = Answering()
SCRAMBLING = Answering(tokens=24)


def recall(path: Path) -> list[Question]:
    """Read recall questions: lines ``{"text": …, "value": … or [… , …]}``.

    SWDE, FDA, SQuAD, TriviaQA, NQ and DROP are published in this form (Arora et al., 2024).
    """
    return [Question(row["text"], _several(row["value"])) for row in _rows(path, "text", "value")]


def scrambling(path: Path, shots: int = 0) -> list[Question]:
    """Read GPT-3's word scrambling: lines ``{"context": …, "completion": …}``.

    Args:
        path: The file.
        shots: Number of solved examples in front of each question, those before it in the file.
    """
    rows = list(_rows(path, "context", "completion"))
    solved = ["".join((row["context"], row["completion"])) for row in rows]
    return [
        Question(
            "".join(solved[i - shots : i]) + rows[i]["context"], (rows[i]["completion"].strip(),)
        )
        for i in range(shots, len(rows))
    ]


def squad(path: Path) -> list[Question]:
    """Read SQuAD v1.1's JSON: each paragraph followed by "Question: … Answer:"."""
    articles = json.loads(read_whole(path))["data"]
    return [
        Question(
            f"{paragraph['context']}\nQuestion: {asked['question']}\nAnswer:",
            tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
        )
        for article in articles
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def _several(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _rows(path: Path, *names: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_whole(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        known = row if isinstance(row, dict) else {}
        missing = [name for name in names if not isinstance(known.get(name), str | list)]
        if missing:
            raise ValueError(
                f"{path}, line {number}, has no {', '.join(missing)}; it needs {', '.join(names)}"
            )
        yield row
