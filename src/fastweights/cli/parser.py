"""The parser of a verb, the link to the verb's code, and options that verbs share."""

from __future__ import annotations

from argparse import ArgumentParser, _ArgumentGroup
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from fastweights.cli.argument_types import (
    DTYPES,
    Device,
    device,
    dtype_name,
    given,
    non_negative_integer,
    own_mixer,
    positive_integer,
    positive_number,
    sequence_length,
)
from fastweights.render.docstrings import first_paragraph

MODEL_SOURCE = "a folder of a run, a checkpoint or a model, or a name on the Hugging Face hub"
TEXT_SOURCES = (
    "files of text (.txt) or of records (.jsonl, .json, .csv, .tsv, .parquet), also compressed"
    " (.gz, .zst), folders, globs, folders that the datasets library saved, hub:NAME[:SPLIT] for a"
    " data set of the Hugging Face hub, or shakespeare, the bundled text"
)
"""What can be read, wherever text is read."""
INT8 = (
    "Round the weights of linear layers to int8 once they are loaded: a quarter of the memory, and"
    " less time per token on a CPU"
)
"""What the option of that name does, wherever models decode."""
BLOCK = 1 << 27
"""Tokens of a block of streamed text unless told otherwise."""


class Parser(ArgumentParser):
    """A parser whose first argument may be left out.

    Attributes:
        implied: the sub-verb that is meant where none is named
    """

    implied: str | None = None

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in a line, which the usage of all options would hide."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help shows all options)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if (
            self.implied is not None
            and args
            and args[0] not in self._verbs
            and not args[0].startswith("-")
        ):
            args = [self.implied, *args]
        return super().parse_known_args(args, namespace)

    @property
    def _verbs(self) -> Collection[str]:
        return [name for action in self._actions for name in action.choices or ()]


@dataclass(frozen=True)
class Deferred:
    """A function of a verb's code, imported when it is called.

    Attributes:
        verb: its file in `fastweights.cli.verbs`
        name: its name there
    """

    verb: str
    name: str

    def load(self) -> Callable[..., Any]:
        """The function itself."""
        return getattr(import_module(f"fastweights.cli.verbs.{self.verb}"), self.name)

    def __call__(self, *arguments: Any) -> Any:
        return self.load()(*arguments)


Declare = Callable[[Parser], Callable[..., Any]]
"""Adds a verb's arguments to its parser and returns what runs the verb; the first paragraph of its
docstring is the verb's help.
"""


def add_verbs(
    parser: ArgumentParser, metavar: str, verbs: dict[str, Declare]
) -> dict[str, tuple[Parser, Callable[..., Any]]]:
    """Declare each verb in a parser of its own: these parsers, and what runs the verbs."""
    subparsers = parser.add_subparsers(metavar=metavar, required=True, parser_class=Parser)
    found: dict[str, tuple[Parser, Callable[..., Any]]] = {}
    for name, declare in verbs.items():
        summary = first_paragraph(declare)
        subparser = subparsers.add_parser(name, help=summary or name, description=summary or name)
        found[name] = subparser, declare(subparser)
    return found


def add_device(parser: ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument(
        "--device",
        type=device,
        default=Device(cpu=False),
        metavar="auto|cpu",
        help="Where to compute: auto takes a GPU if there is one (default: auto)",
    )


def add_patience(group: _ArgumentGroup) -> None:
    """How long one of several processes waits for another."""
    group.add_argument(
        "--patience",
        type=positive_number,
        default=1800.0,
        metavar="SECONDS",
        help="Seconds that one of several processes waits for another in an exchange of numbers,"
        " before it ends, to be started again by torchrun --max-restarts (default: %(default)g)",
    )


def add_dtype(parser: ArgumentParser) -> None:
    """The type of a model's numbers."""
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        metavar="|".join(DTYPES),
        help="Type of the model's weights (default: as they are stored)",
    )


def add_int8(parser: ArgumentParser) -> None:
    """Whether a model decodes with weights of bytes."""
    parser.add_argument("--int8", action="store_true", help=INT8)


def add_plugins(parser: ArgumentParser) -> None:
    """Mixers that a checkpoint needs and the library lacks."""
    parser.add_argument(
        "--mixer",
        action="append",
        type=own_mixer,
        metavar="PACKAGE.MODULE:CLASS",
        help="A mixer class of your own that the model uses; may be given several times",
    )


def add_field(group: ArgumentParser | _ArgumentGroup) -> None:
    """Which column of records holds the text."""
    group.add_argument(
        "--field",
        type=given,
        metavar="NAME",
        help="Column of the text in records, or of a chat's messages (default: text, or instruction"
        " and output, prompt and response, messages)",
    )


def add_across(group: ArgumentParser | _ArgumentGroup) -> None:
    """Whether documents are kept apart."""
    group.add_argument(
        "--across",
        action="store_true",
        help="Let tokens see earlier documents that share their sequence",
    )


def add_order(group: ArgumentParser | _ArgumentGroup) -> None:
    """In which shares and in which order sources are trained on."""
    group.add_argument(
        "--data-weights",
        type=positive_number,
        nargs="+",
        default=(),
        metavar="WEIGHT",
        help="Share of training of each source of --data, in any unit: 0.7 0.2 0.1 (default: the"
        " sources are one text)",
    )
    group.add_argument(
        "--stream",
        type=positive_integer,
        nargs="?",
        const=BLOCK,
        metavar="TOKENS",
        help="Tokenize the text in the background while it is trained on, in blocks of so many"
        " tokens that are shuffled one after the other (default: tokenize all of it before, and"
        f" shuffle all of it; without TOKENS: {BLOCK})",
    )


def add_validation(group: ArgumentParser | _ArgumentGroup, most: int) -> None:
    """What is held out to validate on."""
    group.add_argument(
        "--validation",
        type=given,
        nargs="+",
        default=(),
        metavar="SOURCE",
        help="Text to validate on (default: at most a tenth of the data: documents from all over"
        " it, or its end if there are few)",
    )
    group.add_argument(
        "--validation-tokens",
        type=sequence_length,
        default=most,
        metavar="TOKENS",
        help="Most tokens to validate on, from all over that text (default: %(default)s)",
    )


def add_seed(group: ArgumentParser | _ArgumentGroup) -> None:
    """The seed of what is random."""
    group.add_argument(
        "--seed",
        type=non_negative_integer,
        default=0,
        help="Seed of everything random: the same seed gives the same result"
        " (default: %(default)s)",
    )
