"""Published evaluation files as items: choices, endings and prompts in lm-evaluation-harness's
wording."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fastweights.errors import reason_of
from fastweights.lab.tasks.questions import (
    RECALL,
    SCRAMBLING,
    Answering,
    Question,
    recall,
    scrambling,
    squad,
)
from fastweights.training.data.files import read_whole

Record = Mapping[str, Any]
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError)


@dataclass(frozen=True)
class Choice:
    """A question with several texts of which one is right.

    Either one context has several continuations, or several contexts have one continuation.

    Attributes:
        contexts: One per option.
        continuations: One per option; a space goes between the two.
        gold: Number of the right option.

    Raises:
        ValueError: If there are fewer than two options, or the right one is none of them.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    def __post_init__(self) -> None:
        options = len(self.continuations)
        if options < 2 or len(self.contexts) != options:
            raise ValueError(f"a choice is among two options at least; there are {options}")
        if type(self.gold) is not int or not 0 <= self.gold < options:
            raise ValueError(
                f"{self.gold!r} is not the number of an option; there are 0 … {options - 1}"
            )

    @classmethod
    def of(cls, context: str, continuations: Iterable[str], gold: int) -> Choice:
        """Build a choice between `continuations` of one context."""
        continuations = tuple(continuations)
        return cls((context,) * len(continuations), continuations, gold)

    @property
    def partial(self) -> bool:
        """Whether the contexts differ (Trinh & Le's partial scoring)."""
        return len(set(self.contexts)) > 1


@dataclass(frozen=True)
class Ending:
    """A text whose last words are to be predicted.

    Attributes:
        context: The text before them.
        continuation: The last words, with the space before them.
    """

    context: str
    continuation: str


@dataclass(frozen=True)
class Prompt:
    """A question that a language model answers by continuing its text.

    Attributes:
        question: The text and the right answers.
        answering: How the answer is generated.
        exact: Whether an answer must equal a right one, instead of containing it.
    """

    question: Question
    answering: Answering = RECALL
    exact: bool = False

    def right(self, answer: str) -> bool:
        return self.question.exact(answer) if self.exact else self.question.has_value_in(answer)


Item = Choice | Ending | Prompt


@dataclass(frozen=True)
class TaskFiles:
    """The files of an evaluation task, and the function that reads its items.

    Attributes:
        files: Names of the files in a folder, where they may end in .gz too.
        read: Function from the files' paths to the items.
        takes_shots: Whether `read` takes a number of solved examples.
    """

    files: tuple[str, ...]
    read: Callable[..., list[Item]]
    takes_shots: bool = False

    def items(self, folder: Path, shots: int = 0) -> list[Item]:
        """Read all items.

        Args:
            folder: The folder of the files.
            shots: Number of solved examples before each item, where the task takes any.

        Raises:
            ValueError: If a file is missing or in another form; the message names it.
        """
        paths = [_found(folder, file) for file in self.files]
        try:
            return self.read(*paths, shots) if self.takes_shots else self.read(*paths)
        except _MALFORMED as error:
            names = ", ".join(str(path) for path in paths)
            raise ValueError(
                f"{names} is not in the form of this task ({_reason(error)})"
            ) from error


def recall_prompts(path: Path) -> list[Item]:
    """Read in-context recall in its minimal form: lines ``{"text": …, "value": …}``.

    Raises:
        ValueError: If the file is in another form; the message names it.
    """
    return TaskFiles((path.name,), _recall).items(path.parent)


def _recall(path: Path) -> list[Item]:
    return [Prompt(question) for question in recall(path)]


def _hellaswag(record: Record) -> Choice:
    context = f"{record['activity_label']}: {record['ctx']}"
    return Choice.of(context, record["endings"], int(record["label"]))


def _piqa(path: Path, labels: Path) -> list[Item]:
    golds = iter(read_whole(labels).split())
    found = _each(
        path,
        lambda r: Choice.of(
            f"Question: {r['goal']}\nAnswer:", (r["sol1"], r["sol2"]), int(next(golds, "none"))
        ),
    )
    if more := len(list(golds)):
        raise ValueError(f"there are {more} labels more than questions")
    return found


def _arc(record: Record) -> Choice:
    choices = record["question"]["choices"]
    gold = [choice["label"] for choice in choices].index(record["answerKey"])
    return Choice.of(
        f"Question: {record['question']['stem']}\nAnswer:", [c["text"] for c in choices], gold
    )


def _openbookqa(record: Record) -> Choice:
    return Choice.of(record["query"], record["choices"], int(record["gold"]))


def _boolq(record: Record) -> Choice:
    context = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    return Choice.of(context, ("no", "yes"), int(record["answer"]))


def _copa(path: Path) -> list[Item]:
    return [_copa_item(item) for item in ElementTree.fromstring(read_whole(path)).iter("item")]


def _copa_item(item: ElementTree.Element) -> Choice:
    premise, *options = (item.findtext(tag, "").strip() for tag in ("p", "a1", "a2"))
    connector = {"cause": "because", "effect": "therefore"}[item.attrib["asks-for"]]
    continuations = [option[0].lower() + option[1:] for option in options]
    return Choice.of(
        f"{premise[:-1]} {connector}",
        continuations,
        int(item.attrib["most-plausible-alternative"]) - 1,
    )


def _schema(record: Record) -> Choice:
    """WinoGrande and Winograd: what follows the pronoun, after either referent."""
    contexts = tuple(record["context_options"])
    return Choice(contexts, (record["continuation"],) * len(contexts), int(record["gold"]))


def _last_word(record: Record) -> Ending:
    if not record["text"].strip():
        raise ValueError("its text is empty, and has no last word")
    context, _, word = record["text"].rpartition(" ")
    return Ending(context, f" {word}")


def _nq(record: Record) -> Prompt:
    return Prompt(Question(f"Question: {record['question']}?\nAnswer:", tuple(record["answer"])))


def _scrambling_prompts(path: Path, shots: int) -> list[Item]:
    return [Prompt(question, SCRAMBLING, exact=True) for question in scrambling(path, shots)]


def _squad(path: Path) -> list[Item]:
    return [Prompt(question) for question in squad(path)]


def _lines(item: Callable[[Record], Item], file: str) -> TaskFiles:
    """A file with an item in every line."""
    return TaskFiles((file,), lambda path: _each(path, item))


def _scrambled(name: str) -> TaskFiles:
    return TaskFiles((f"gpt3_{name}.jsonl",), _scrambling_prompts, takes_shots=True)


SOURCES: dict[str, TaskFiles] = {
    "hellaswag": _lines(_hellaswag, "hellaswag_val.jsonl"),
    "piqa": TaskFiles(("piqa_valid.jsonl", "piqa_valid-labels.lst"), _piqa),
    "arc_easy": _lines(_arc, "arc_easy_test.jsonl"),
    "arc_challenge": _lines(_arc, "arc_challenge_test.jsonl"),
    "openbookqa": _lines(_openbookqa, "openbookqa_test.jsonl"),
    "boolq": _lines(_boolq, "boolq_dev.jsonl"),
    "copa": TaskFiles(("copa_test.xml",), _copa),
    "winogrande": _lines(_schema, "winogrande_dev.jsonl"),
    "winograd": _lines(_schema, "winograd_wsc.jsonl"),
    "lambada": _lines(_last_word, "lambada_openai_test.jsonl"),
    "anagrams1": _scrambled("mid_word_1_anagrams"),
    "anagrams2": _scrambled("mid_word_2_anagrams"),
    "cycle_letters": _scrambled("cycle_letters_in_word"),
    "random_insertion": _scrambled("random_insertion_in_word"),
    "reversed_words": _scrambled("reversed_words"),
    "squad": TaskFiles(("squad_xquad_en.json",), _squad),
    "nq_open": _lines(_nq, "nq_open_dev.jsonl"),
}
"""The tasks by name, and the files of each as they are published."""


def _found(folder: Path, file: str) -> Path:
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    raise ValueError(
        f"{folder / file} does not exist, with or without .gz; give the folder of the evaluation"
        " files"
    )


def _each(path: Path, item: Callable[[Record], Item]) -> list[Item]:
    """The item of every line; an error names the line."""
    found = list[Item]()
    for number, line in enumerate(read_whole(path).split("\n"), 1):
        if line.strip():
            try:
                found.append(item(json.loads(line)))
            except _MALFORMED as error:
                raise ValueError(f"line {number}: {_reason(error)}") from error
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return reason_of(error)
