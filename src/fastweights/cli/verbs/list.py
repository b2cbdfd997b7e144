"""fastweights list"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from inspect import Parameter, cleandoc, signature

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.cli.verbs.recipes import recipes
from fastweights.lab.tasks import TASKS, Protocol, Segment
from fastweights.mixer import Mixer
from fastweights.mixers import MIXERS
from fastweights.models import PRESETS
from fastweights.models.loss import IGNORE_INDEX
from fastweights.render.docstrings import first_paragraph
from fastweights.render.units import millions


def list_(chosen: Namespace, console: Console) -> None:
    """Print a table of mixers, architectures, tasks or recipes."""
    asked = {"presets": _presets, "tasks": _tasks, "recipes": recipes}
    show = next((show for name, show in asked.items() if getattr(chosen, name)), _mixers)
    show(chosen, console)


def _tasks(chosen: Namespace, console: Console) -> None:
    wanted = _wanted(TASKS, "task", chosen)
    table = _named_table("training", "tests", "length", "classes", "source")
    for name in wanted:
        one = TASKS[name]
        train, test = (_examples(part) for part in (one.train, one.test))
        table.add_row(
            Text(name, "bold"),
            train,
            test,
            f"{one.task.length:,}",
            f"{one.task.classes:,}",
            one.source,
        )
    console.print(table)
    exact = [name for name in wanted if name in chosen.names]
    for name in exact or (wanted if len(wanted) == 1 else []):
        _show_example(TASKS[name], console)


def _wanted(names: Iterable[str], what: str, chosen: Namespace) -> list[str]:
    """The names that begin with one of those that are asked for, or all."""
    wanted = [name for name in names if not chosen.names or name.startswith(tuple(chosen.names))]
    if not wanted:
        raise ValueError(
            f"no {what} begins with {' or '.join(chosen.names)}; leave the name out to see all"
        )
    return wanted


def _examples(segments: tuple[Segment, ...]) -> str:
    counts = [segment.examples for segment in segments if segment.examples is not None]
    return f"{sum(counts):,}" if counts else "new"


def _show_example(protocol: Protocol, console: Console) -> None:
    """Print how a task differs from its source, and a test example: inputs above their labels."""
    console.print(protocol.differs or "as the source")
    batch = protocol.test[0].task.draw(np.random.default_rng(0), 1)
    console.print(f"\ninputs  {' '.join(map(str, batch.inputs.flatten().tolist()))}")
    labels = [
        "." if label == IGNORE_INDEX else str(label) for label in batch.labels.flatten().tolist()
    ]
    console.print(f"labels  {' '.join(labels)}")


def _presets(chosen: Namespace, console: Console) -> None:
    wanted = _wanted(PRESETS, "preset", chosen)
    table = _named_table("parameters", "published", "mixers", "source")
    for name in wanted:
        one = PRESETS[name]
        published = "" if one.published is None else millions(one.published)
        mixers = ", ".join(dict.fromkeys(one.config().mixer_names))
        table.add_row(Text(name, "bold"), millions(one.parameters()), published, mixers, one.source)
    console.print(table)


def _mixers(chosen: Namespace, console: Console) -> None:
    unknown = [name for name in chosen.names if name not in MIXERS]
    if unknown:
        raise ValueError(
            f"unknown mixers: {', '.join(unknown)}; there are {', '.join(sorted(MIXERS))}"
        )
    table = _named_table("paper and table row", "arguments", show_lines=True)
    for name in chosen.names or sorted(MIXERS):
        table.add_row(Text(name, "bold"), _describe(MIXERS[name]), _arguments(MIXERS[name]))
    console.print(table)


def _describe(mixer: type[Mixer]) -> Text:
    """The paper, from the module's docstring, and the row, from the class's."""
    paper = first_paragraph(sys.modules[mixer.__module__]) or mixer.__name__
    row = cleandoc(mixer.__doc__ or "").split("\n\n")[0]
    return Text.assemble((paper, "italic"), "\n", row)


def _arguments(mixer: type[Mixer]) -> Text:
    taken = [p for name, p in signature(mixer).parameters.items() if name != "d"]
    return Text(
        "\n".join(
            p.name if p.default is Parameter.empty else f"{p.name} = {p.default}" for p in taken
        )
    )


def _named_table(*columns: str, show_lines: bool = False) -> Table:
    """A table of things by their names, which stay whole however narrow the terminal is."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=show_lines)
    table.add_column("name", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
