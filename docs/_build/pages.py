"""What pages of the site take from the library itself, at ``<!-- generate: NAME -->``."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, _SubParsersAction
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import cleandoc, getmodule
from unittest.mock import patch

import fastweights
from fastweights import MIXERS, cli

MARK = re.compile(r"<!-- generate: (\w+) -->")
PLACES = {
    "recurrences": ("fastweights.recurrence",),
    "methods": ("fastweights.methods", "fastweights.kernels"),
    "mixers": ("fastweights.mixer", "fastweights.mixers"),
    "models": ("fastweights.models",),
    "generate": ("fastweights.generate",),
}
"""The page of ``reference/`` on which names of these modules stand."""


def on_page_markdown(markdown: str, **_: object) -> str:
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def names() -> str:
    """A table of ``fastweights.__all__``."""
    rows = [f"| {_link(name)} | {_summary(getattr(fastweights, name))} |" for name in sorted(
        fastweights.__all__, key=str.lower)]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _link(name: str) -> str:
    if name == "linearize":
        return "[`linearize`](linearize.md)"
    return f"[`{name}`][fastweights.{name}]"


def _summary(documented: object) -> str:
    if isinstance(documented, dict):
        return f"{len(documented)} entries by name"
    text = cleandoc(documented.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r"\s{3,}.*$", "", text)
    plain = re.match(r"[^\W\d]\w*_\w+ = ", text) is None
    return (text if plain else f"`{text}`").replace("|", r"\|")


def mixers() -> str:
    """A section per mixer: the paper, the table row, the arguments."""
    return "\n\n".join(_mixer(name) for name in MIXERS)


def _mixer(name: str) -> str:
    mixer = MIXERS[name]
    paper = cleandoc(getattr(getmodule(mixer), "__doc__", "")).split("\n\n")[0].replace("\n", " ")
    return "\n".join(
        [
            f"### {name} {{ #mixer-{name} }}",
            "",
            paper,
            "",
            f"::: {mixer.__module__}.{mixer.__qualname__}",
            "    options:",
            "      heading_level: 4",
            "      members: []",
            "      show_bases: false",
            "      show_if_no_docstring: true",
            "      show_root_toc_entry: false",
        ]
    )


def command() -> str:
    """A section per verb, from the parsers that the command itself uses."""
    verbs = _choices(parser_of())
    return "\n\n".join("\n".join(_verb([verb])) for verb in verbs)


def parser_of(*words: str) -> ArgumentParser:
    """The parser that answers ``fastweights WORDS --help``."""
    found: list[ArgumentParser] = []
    with (
        patch.object(ArgumentParser, "print_help", lambda self, file=None: found.append(self)),
        suppress(SystemExit),
    ):
        cli.main([*words, "--help"])
    return found[0]


def _choices(parser: ArgumentParser) -> list[str]:
    return [
        name
        for action in parser._actions
        if isinstance(action, _SubParsersAction)
        for name in action.choices
    ]


def _verb(words: list[str]) -> Iterator[str]:
    parser = parser_of(*words)
    yield f"{'#' * (len(words) + 1)} {' '.join(words)} {{ #{'-'.join(words)} }}"
    yield ""
    yield parser.description or ""
    for group in parser._action_groups:
        rows = [row for action in group._group_actions for row in _row(parser, action)]
        if rows:
            yield ""
            yield f"| {group.title or 'options'} | |"
            yield "|---|---|"
            yield from rows
    for name in _choices(parser):
        yield ""
        yield from _verb([*words, name])


def _row(parser: ArgumentParser, action: Action) -> Iterator[str]:
    if action.help == SUPPRESS or isinstance(action, _SubParsersAction) or action.dest == "help":
        return
    formatter = HelpFormatter(parser.prog)
    metavar = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    flags = ", ".join(action.option_strings)
    what = f"{flags} {metavar}".strip().replace("|", r"\|")
    help_ = formatter._expand_help(action) if action.help else ""
    yield f"| `{what}` | {_escaped(help_)} |"


def _escaped(text: str) -> str:
    """Help as Markdown: placeholders and patterns are no markup."""
    return re.sub(r"([|*<_\[\]])", r"\\\1", text)


GENERATED: dict[str, Callable[[], str]] = {"names": names, "mixers": mixers, "command": command}
