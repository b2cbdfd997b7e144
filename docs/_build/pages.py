"""What pages of the site take from the library itself, at ``<!-- generate: NAME -->``."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, _SubParsersAction
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import cleandoc, getmodule, ismodule
from unittest.mock import patch

import fastweights
from fastweights import DPLR, LTV, MIXERS, Decay, Delta, Mesa, Recurrence, Softmax, cli, recurrence

FIRST = (Recurrence, Decay, Delta, DPLR, Mesa, Softmax, LTV, recurrence.Solver)
"""What comes before its section's other members, which are in alphabetical order."""

KINDS: dict[str, tuple[type, ...]] = {
    "Rules": (Recurrence,),
    "Solvers": (recurrence.Solver,),
    "Linear systems": (LTV, recurrence.DenseLTV, recurrence.Transition),
}
MARK = re.compile(r"<!-- generate: (\w+) -->")


def on_page_markdown(markdown: str, **_: object) -> str:
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)


def names() -> str:
    """A table of ``fastweights.__all__``."""
    rows = [
        f"| {_link(name)} | {_summary(getattr(fastweights, name))} |"
        for name in sorted(fastweights.__all__, key=str.lower)
    ]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _link(name: str) -> str:
    if ismodule(getattr(fastweights, name)):
        return f"[`{name}`]({name}.md)"
    return f"[`{name}`][fastweights.{name}]"


def _summary(documented: object) -> str:
    if isinstance(documented, dict):
        return f"{len(documented)} entries by name"
    text = cleandoc(documented.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(r"\s{3,}.*$", "", text)
    plain = re.match(r"[^\W\d]\w*_\w+ = ", text) is None
    return text.replace("|", r"\|") if plain else f"`{text}`"


def recurrences() -> str:
    """Sections of ``fastweights.recurrence``: rules, solvers, systems, what is left."""
    left = [getattr(recurrence, name) for name in recurrence.__all__]
    sections = []
    for title, first in KINDS.items():
        chosen = [one for one in left if isinstance(one, type) and issubclass(one, first)]
        left = [one for one in left if one not in chosen]
        sections.append((title, sorted(chosen, key=_place)))
    named = {getattr(recurrence, name): name for name in recurrence.__all__ if name != "State"}
    sections.append(("Functions and errors", [one for one in left if one in named]))
    return "\n\n".join(
        "\n".join([f"## {title}", "", *(_documented(named[one]) for one in members)])
        for title, members in sections
    )


def _place(one: type) -> int:
    return FIRST.index(one) if one in FIRST else len(FIRST)


def _documented(name: str) -> str:
    return f"::: fastweights.recurrence.{name}\n    options:\n      heading_level: 3\n"


def mixers() -> str:
    """A section per mixer: its arguments, the table row, the paper."""
    return "\n\n".join(_mixer(name) for name in MIXERS)


def _mixer(name: str) -> str:
    mixer = MIXERS[name]
    paper = cleandoc(getmodule(mixer).__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return "\n".join(
        [
            f"::: {mixer.__module__}.{mixer.__qualname__}",
            "    options:",
            f"      heading: {name}",
            f"      toc_label: {name}",
            "      heading_level: 3",
            "      members: []",
            "      show_bases: false",
            "      show_if_no_docstring: true",
            "      show_symbol_type_heading: false",
            "      show_symbol_type_toc: false",
            "",
            f"*{paper}*",
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
    what = f"{flags} {metavar}".strip()
    help_ = formatter._expand_help(action) if action.help else ""
    yield f"| `{what}` | {_escaped(help_)} |"


def _escaped(text: str) -> str:
    """Help as Markdown: placeholders and patterns are no markup."""
    return re.sub(r"([|*_\[\]])", r"\\\1", text).replace("<", "&lt;")


GENERATED: dict[str, Callable[[], str]] = {
    "names": names,
    "recurrences": recurrences,
    "mixers": mixers,
    "command": command,
}
