"""The parser of the command: its verbs, each with its options and the link to its code."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, _SubParsersAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NoReturn

from fastweights.cli.options import Options, options_of
from fastweights.render.docstrings import first_paragraph


class Parser(ArgumentParser):
    """A parser that says what is wrong in a line.

    Attributes:
        aliases: Words that first arguments stand for; those for "" where the first argument is no
            verb.
    """

    aliases: Mapping[str, Sequence[str]] = {}

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in a line, which the usage of all options would hide."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help shows all options)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.aliases and args and not args[0].startswith("-"):
            if args[0] in self.aliases:
                args = [*self.aliases[args[0]], *args[1:]]
            elif args[0] not in {name for action in self._actions for name in action.choices or ()}:
                args = [*self.aliases[""], *args]
        return super().parse_known_args(args, namespace)


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


class Verb(Options):
    """A verb: its options, and what it does; the first paragraph of its docstring is its help.

    Attributes:
        run: What runs it.
        groups: Groups of options besides its own.
        verbs: The verbs behind it, if it has any in place of options.
        metavar: What the help calls one of these.
        aliases: What other words behind it mean, as `Parser` has them.
        usage: How it is used, where argparse would say it otherwise.
    """

    run: ClassVar[Deferred]
    groups: ClassVar[Sequence[type[Options]]] = ()
    verbs: ClassVar[Mapping[str, type[Verb]]] = {}
    metavar: ClassVar[str] = "VERB"
    aliases: ClassVar[Mapping[str, Sequence[str]]] = {}
    usage: ClassVar[str | None] = None


def add_verbs(parser: ArgumentParser, metavar: str, verbs: Mapping[str, type[Verb]]) -> None:
    """Declare each verb in a parser of its own."""
    parsers: _SubParsersAction[Any] = parser.add_subparsers(
        metavar=metavar, dest=metavar.lower(), required=True, parser_class=Parser
    )
    for name, verb in verbs.items():
        words = first_paragraph(verb)
        inner = parsers.add_parser(name, help=words, description=words, usage=verb.usage)
        inner.aliases = verb.aliases
        inner.add_argument("--debug", action="store_true", default=SUPPRESS, help=SUPPRESS)
        if verb.verbs:
            add_verbs(inner, verb.metavar, verb.verbs)
            continue
        inner.set_defaults(run=verb.run)
        for group in (verb, *verb.groups):
            place = inner if group.title is None else inner.add_argument_group(group.title)
            for option in options_of(group):
                option.add_to(place)
