"""Options from classes: a class's fields are options, its docstring is their help.

The type of a field says what its value is, as `argument_types` reads it; its default is the
option's. A field of the library's (`settings.fields_of`) stands for its default and its range.
"""

from __future__ import annotations

import re
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser, _ArgumentGroup
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import cleandoc
from string import Template
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from fastweights.cli.argument_types import Number
from fastweights.cli.settings import LibraryField

PHRASES = {
    "MODEL_SOURCE": "a folder of a run, a checkpoint or a model, a GGUF file (with the extra gguf),"
    " or a name on the Hugging Face hub",
    "TEXT_SOURCES": "files of text (.txt) or of records (.jsonl, .json, .csv, .tsv, .parquet), also"
    " compressed (.gz, .zst), folders, globs, folders that the datasets library saved,"
    " hub:NAME[:SPLIT] for a data set of the Hugging Face hub, or shakespeare, the bundled text",
    "INT8": "Round weights to int8 while they are loaded: a quarter of the memory, and less time"
    " per token on a CPU",
    "INT4": "Round weights to 4 bits, in groups of 32, embeddings and the head to int8: a sixth of"
    " the memory, and less time still",
}
"""What several options say."""
_MISSING = object()


class Options:
    """A group of options; the fields of the classes that it is made of come after its own.

    Attributes:
        title: What the help calls the group; none for options without one.
    """

    title: ClassVar[str | None] = None


@dataclass(frozen=True)
class Named:
    """The names of an option that are not its field's; none for an argument by its place."""

    names: tuple[str, ...] = ()


PLACE = Named()
"""Marks an argument that is known by its place."""
REPEATED: Mapping[str, Any] = {"action": "append", "nargs": None}
"""Marks an option that may be given several times."""
REST: Mapping[str, Any] = {"nargs": REMAINDER}
"""Marks an argument that takes all words that are left."""


@dataclass
class Option:
    """An option as argparse takes it.

    Attributes:
        dest: Name of the field.
        default: The value where it is not given.
        words: What it does.
        flag: Whether it takes no value.
        names: As it is written; none if it is known by its place.
        keywords: What argparse is told besides.
    """

    dest: str
    default: Any
    words: str
    flag: bool
    names: tuple[str, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def add_to(self, group: ArgumentParser | _ArgumentGroup) -> None:
        """Let a parser take it."""
        keywords: dict[str, Any] = {"help": self._help(), **self.keywords}
        if self.names:
            keywords = {"dest": self.dest, **keywords}
        if self.flag:
            keywords |= {"action": "store_true"}
        elif self.default is not _MISSING:
            repeated = keywords.get("action") == "append"
            keywords["default"] = list(self.default) if repeated else self.default
        elif self.names:
            keywords["required"] = True
        added = group.add_argument(*(self.names or (self.dest,)), **keywords)
        added.required &= keywords.get("nargs") != REMAINDER  # as since Python 3.12

    def _help(self) -> str:
        words, default = self.words.replace("%", "%%"), self.default
        if self.flag or default in (None, (), _MISSING, SUPPRESS) or "(default" in words:
            return words
        return f"{words} (default: {_in_words(default)})"


def options_of(kind: type[Options]) -> Iterator[Option]:
    """Yield the options that a class declares, each once, its own before those of its bases."""
    hints, words = get_type_hints(kind, include_extras=True), dict[str, str]()
    for base in reversed(kind.__mro__):
        words |= _help_in(base)
    declared = (name for base in kind.__mro__ for name in vars(base).get("__annotations__", {}))
    for name in dict.fromkeys(declared):
        if get_origin(hints[name]) is not ClassVar:
            yield _option(name, hints[name], getattr(kind, name, _MISSING), words[name])


def _option(name: str, hint: Any, default: Any, words: str) -> Option:
    plain = default.default if isinstance(default, LibraryField) else default
    flag = bool in (hint, getattr(hint, "__origin__", None))
    option = Option(name, plain, words, flag, (f"--{name.replace('_', '-')}",))
    if isinstance(default, LibraryField) and default.range is not None:
        option.keywords["type"] = Number(default.range)
    for part in _metadata(hint):
        match part:
            case str():
                option.keywords["metavar"] = part
            case tuple():
                option.keywords["choices"] = part
            case Mapping():
                option.keywords |= part
            case Named():
                option.names = part.names
            case _:
                option.keywords["type"] = part
    return option


def _metadata(hint: Any) -> tuple[Any, ...]:
    """What annotates a type, or the parts of it; a tuple of values with a type takes several."""
    if get_origin(hint) is Annotated:
        return (*_metadata(hint.__origin__), *hint.__metadata__)
    if get_origin(hint) in (Union, UnionType):
        return _metadata(get_args(hint)[0])
    if get_origin(hint) is tuple and (each := _metadata(get_args(hint)[0])):
        return (*each, {"nargs": "+"})
    return ()


def _help_in(kind: type) -> dict[str, str]:
    """The help of each field in a class's docstring, which is that of the field where it has one
    alone; ``$NAME`` is one of `PHRASES`, or of the constants of its module.
    """
    first, _, section = cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    entries = entries or [(name, first) for name in vars(kind).get("__annotations__", {})]
    constants = PHRASES | vars(sys.modules[kind.__module__])
    return {
        name: Template(" ".join(words.split()).removesuffix(".")).safe_substitute(constants)
        for name, words in entries
    }


def _in_words(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
