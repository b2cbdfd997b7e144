"""The command within the process of a test: what it says, and what a run of it leaves."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from fastweights.cli import main
from fastweights.training.loop.parts import PARTS

SMALL = (
    *("--layers", "1", "--width", "8", "--length", "16", "--batch", "4", "--device", "cpu"),
    *("--steps", "6", "--warmup", "1", "--log-every", "1", "--eval-every", "3"),
    *("--checkpoint-every", "2", "--sample", "0"),
)
"""Six steps of a very small model, a checkpoint at every other one."""
TIMES = ("seconds", "tokens_per_second")
VARYING = ("training.json", "tokenizer_config.json", "shards.jsonl", "results.json")
"""Files that also say how a run came about."""


def parsers_of(parser: ArgumentParser, *verbs: str) -> Iterator[tuple[str, ArgumentParser]]:
    """Every parser behind one, with the words that lead to it."""
    yield " ".join(verbs), parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for verb, inner in action.choices.items():
                yield from parsers_of(inner, *verbs, verb)


class Said(NamedTuple):
    """How a command ended.

    Attributes:
        status: Its exit status.
        out: What it said.
        error: What it said to standard error.
    """

    status: int
    out: str
    error: str


def run_here(arguments: Sequence[str | Path]) -> Said:
    """Run the command in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as error:
        status = main([str(argument) for argument in arguments])
    return Said(status, out.getvalue(), error.getvalue())


def write_text(folder: Path) -> Path:
    """A text to train on."""
    path = folder / "text.txt"
    lines = (f"{n} sheep, {n * n % 97} goats; né à Zürich\n" for n in range(150))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def train_words(text: Path, out: Path, *more: str) -> list[str]:
    """The command that trains a very small model on a text."""
    return ["train", "--data", str(text), *SMALL, "--out", str(out), *more]


def timeless(path: Path) -> list[dict]:
    """The rows of a curve without the times that they took."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in row.keys() - set(TIMES)} for row in rows]


def outcome(out: Path) -> dict[str, object]:
    """What a run leaves, bit for bit, by path: curves, the text, weights, the optimiser's state."""
    files = {
        str(path.relative_to(out)): path
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.suffix in (".safetensors", ".jsonl", ".tokens", ".json")
    }
    return {
        name: timeless(path) if path.name == "metrics.jsonl" else _content(path)
        for name, path in files.items()
        if path.name not in VARYING and ".damaged" not in name
    }


def copy_run(source: Path, out: Path) -> Path:
    """A copy of a run's folder."""
    return shutil.copytree(source, out, dirs_exist_ok=True)


def _content(path: Path) -> object:
    """Bytes; of the parts of a model the tensors, since the order of their headers is random."""
    if path.parent.name != PARTS or path.suffix != ".safetensors":
        return path.read_bytes()
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
