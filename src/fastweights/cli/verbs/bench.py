"""fastweights bench"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from fastweights.cli.load import load_config
from fastweights.cli.progress import WIDE
from fastweights.lab.bench.decode import DecodePlan, plot_flatness, run_decode
from fastweights.lab.bench.machine import Ceilings, commit
from fastweights.lab.bench.mesa import MesaPlan, run_mesa
from fastweights.lab.bench.ops import OpsPlan, run_ops, run_scaling
from fastweights.lab.bench.report import Report, open_report
from fastweights.lab.bench.timing import Budget
from fastweights.lab.bench.training import TrainPlan, run_training
from fastweights.mixers.mesa import mesa_layers
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.size import sketch_of
from fastweights.training.loop.checkpoint import model_folder
from fastweights.training.loop.files import write_figure

QUICK = Budget(seconds=0.1, runs=5)
Row = dict[str, Any]
Measure = Callable[[Report, torch.device], None]
"""Measures what a plan, which has been found to match something, asks for."""


def bench_ops(chosen: Namespace, console: Console) -> None:
    """Recurrences and layers beside other libraries."""
    memory = 0.0 if chosen.no_memory else OpsPlan.memory_limit
    budget = QUICK if chosen.quick else Budget(chosen.seconds)
    plan = OpsPlan(
        chosen.quick, chosen.only, first=chosen.first, budget=budget, memory_limit=memory
    )
    plan.cases()
    run = run_scaling if chosen.scaling else run_ops
    _bench(chosen, console, lambda report, device: run(report, plan, device))


def bench_decoding(chosen: Namespace, console: Console) -> None:
    """One token, and how constant its time stays."""
    plan = DecodePlan(
        chosen.quick,
        chosen.only,
        QUICK if chosen.quick else Budget(),
        chosen.tokens,
        chosen.compile,
    )
    plan.names()
    _bench(chosen, console, lambda report, device: _run_decode(plan, report, device))


def _run_decode(plan: DecodePlan, report: Report, device: torch.device) -> None:
    run_decode(report, plan, device)
    if rows := [row for row in report.rows if row["type"] == "FlatnessRow"]:
        write_figure(report.path.with_suffix(".png"), plot_flatness(rows))


def bench_training(chosen: Namespace, console: Console) -> None:
    """Training steps of small models."""
    compiled = not chosen.eager
    plan = (
        TrainPlan.quick(chosen.only, compiled=compiled)
        if chosen.quick
        else TrainPlan(chosen.only, compiled=compiled)
    )
    plan.mixers()
    _bench(chosen, console, lambda report, device: run_training(report, plan, device))


def bench_mesa(chosen: Namespace, console: Console) -> None:
    """Mesa's solvers, or a checkpoint's loss."""
    checkpoint = None if chosen.checkpoint is None else _with_mesa(chosen.checkpoint)
    budget = QUICK if chosen.quick else Budget(chosen.seconds)
    sizes = {"tokens": chosen.tokens, "length": chosen.length}
    plan = MesaPlan(chosen.quick, checkpoint, chosen.text, **sizes, budget=budget)
    _bench(chosen, console, lambda report, device: run_mesa(report, plan, device))


def _with_mesa(checkpoint: Path) -> Path:
    """The folder of a model, one with Mesa layers."""
    config = load_config(folder := model_folder(checkpoint))
    if not isinstance(config, FastWeightsConfig):
        raise ValueError(
            f"{checkpoint} is a {config.model_type}, which has no Mesa layer; name a model with one"
        )
    with torch.device("meta"):
        mesa_layers(FastWeightsForCausalLM(sketch_of(config)))
    return folder


def _bench(chosen: Namespace, console: Console, measure: Measure) -> None:
    """Measure a target, printing rows as they come and tables at the end."""
    device = torch.device("cpu")
    path = chosen.out or _default_path(chosen)
    settings = {"quick": chosen.quick}
    report = open_report(
        chosen.target,
        path,
        settings,
        device,
        _Live(console),
        lambda: asdict(Ceilings.measure_now(device, quick=chosen.quick)),
    )
    measure(report, device)
    if not console.is_terminal:
        console.width = WIDE
    for table in map(_table, _together(report.rows)):
        console.print(table)
    console.print(f"{len(report.rows)} rows in {path}", soft_wrap=True)


def _default_path(chosen: Namespace) -> Path:
    """One file per commit, so that a new one never meets the old one's rows."""
    quick = "-quick" if chosen.quick else ""
    return Path("runs", "bench", f"{chosen.target}{quick}-{(commit() or 'nowhere')[:9]}.json")


@dataclass(frozen=True)
class _Live:
    """Prints a line for each row as it comes."""

    console: Console

    def __call__(self, row: Row) -> None:
        line = "  ".join(
            filter(None, (f"{c.name} {c.cell(row)}" if c.cell(row) else "" for c in _COLUMNS))
        )
        self.console.print(f"{row['group']}: {line}", soft_wrap=True)


@dataclass(frozen=True)
class _Column:
    """A column of the tables, and the text of a row in it: empty where the row has no such
    figure.
    """

    name: str
    key: str
    text: Callable[[Any], str]

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        return "" if value is None or value == "" else self.text(value)


def _time(seconds: Row) -> str:
    return _with_unit(seconds["median"], (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def _with_unit(value: float, units: tuple[tuple[str, float], ...]) -> str:
    for unit, size in units:
        if value >= size:
            return f"{value / size:.3g} {unit}"
    unit, size = units[-1]
    return f"{value / size:.3g} {unit}"


def _number(template: str) -> Callable[[float], str]:
    return template.format


_COLUMNS = (
    _Column("by", "library", str),
    _Column("with", "contender", str),
    _Column("mixer", "mixer", str),
    _Column("time", "seconds", lambda s: _time(s) if isinstance(s, dict) else ""),
    _Column("spread", "spread", _number("{:.0%}")),
    _Column("× ours", "ratio", _number("{:.2f}")),
    _Column("of GEMM", "gemm", _number("{:.1%}")),
    _Column("of bandwidth", "bandwidth", _number("{:.1%}")),
    _Column("× floor", "over_floor", _number("{:.2f}")),
    _Column("× base", "over", _number("{:.2f}")),
    _Column("steps", "steps", _number("{:.1f}")),
    _Column("loss", "loss", _number("{:.4f}")),
    _Column("tokens/s", "tokens_per_second", _number("{:,.0f}")),
    _Column("error", "error", _number("{:.1e}")),
    _Column("of gradients", "gradient_error", _number("{:.1e}")),
    _Column(
        "peak", "peak_bytes", partial(_with_unit, units=(("GB", 1e9), ("MB", 1e6), ("kB", 1e3)))
    ),
    _Column("slope", "slope", _number("{:.3f}")),
    _Column("slope above", "upper_slope", _number("{:.3f}")),
    _Column("growth", "growth", _number("{:.2f}")),
    _Column("note", "note", str),
)


def _together(rows: list[Row]) -> list[list[Row]]:
    """The rows of each table: a group of several contenders, or neighbouring groups of one row."""
    groups = [list(group) for _, group in groupby(rows, lambda row: row["group"])]
    tables: list[list[Row]] = []
    for group in groups:
        alone = len(group) == 1 and tables and tables[-1][0]["group"] != tables[-1][-1]["group"]
        first = len(group) == 1 and tables and len(tables[-1]) == 1
        if (alone or first) and tables[-1][0]["type"] == group[0]["type"]:
            tables[-1].extend(group)
        else:
            tables.append(group)
    return tables


def _table(rows: list[Row]) -> Table:
    """Columns that are empty in all of the rows are left out."""
    shown = [c for c in _COLUMNS if any(c.cell(row) for row in rows)]
    group = rows[0]["group"]
    one = all(row["group"] == group for row in rows)
    table = Table(title=group if one else None, title_justify="left", box=box.SIMPLE_HEAD)
    for column in [] if one else ["what"]:
        table.add_column(column, no_wrap=True)
    for column in shown:
        table.add_column(
            column.name, justify="left" if column.text is str else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*([] if one else [row["group"]]), *(c.cell(row) for c in shown))
    return table
