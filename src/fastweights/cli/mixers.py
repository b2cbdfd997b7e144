"""fastweights list"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from inspect import Parameter, cleandoc, signature

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.mixer import Mixer
from fastweights.mixers import MIXERS
from fastweights.models import PRESETS


def mixers(parser: ArgumentParser) -> Callable[[Namespace, Console], None]:
    """The mixers: their papers, what they compute, and their arguments; or the presets, and their sizes."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--presets", action="store_true", help="named architectures (NAME: how their names begin)")
    return _list


def _list(chosen: Namespace, console: Console) -> None:
    (_presets if chosen.presets else _mixers)(chosen, console)


def _presets(chosen: Namespace, console: Console) -> None:
    wanted = [name for name in PRESETS if not chosen.names or name.startswith(tuple(chosen.names))]
    if not wanted:
        raise ValueError(f"no preset begins with {' or '.join(chosen.names)}; leave the name out to see all")
    table = Table("name", "parameters", "published", "mixers", "source", box=box.SIMPLE_HEAD)
    for name in wanted:
        one = PRESETS[name]
        published = "" if one.published is None else f"{one.published / 1e6:,.4g}M"
        mixers = ", ".join(mixer["name"] for mixer in one.fields["mixers"])
        table.add_row(Text(name, "bold"), f"{one.parameters() / 1e6:,.4g}M", published, mixers, one.source)
    console.print(table)


def _mixers(chosen: Namespace, console: Console) -> None:
    unknown = [name for name in chosen.names if name not in MIXERS]
    if unknown:
        raise ValueError(f"unknown mixers: {', '.join(unknown)}; there are {', '.join(sorted(MIXERS))}")
    table = Table("name", "paper and table row", "arguments", box=box.SIMPLE_HEAD, show_lines=True)
    for name in chosen.names or sorted(MIXERS):
        table.add_row(Text(name, "bold"), _described(MIXERS[name]), _arguments(MIXERS[name]))
    console.print(table)


def _described(mixer: type[Mixer]) -> Text:
    """The paper, from the module's docstring, and the row, from the class's."""
    paper = (sys.modules[mixer.__module__].__doc__ or mixer.__name__).strip().splitlines()[0]
    row = cleandoc(mixer.__doc__ or "").split("\n\n")[0]
    return Text.assemble((paper, "italic"), "\n", row)


def _arguments(mixer: type[Mixer]) -> Text:
    taken = [p for name, p in signature(mixer).parameters.items() if name != "d"]
    return Text("\n".join(p.name if p.default is Parameter.empty else f"{p.name} = {p.default}" for p in taken))
