"""fastweights bench"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.cli.arguments import mixer_name
from fastweights.lab.bench.decode import DecodePlan, plot_flatness, run_decode
from fastweights.lab.bench.gpu import GpuPlan, run_gpu
from fastweights.lab.bench.machine import commit
from fastweights.lab.bench.mesa import MesaPlan, run_mesa
from fastweights.lab.bench.ops import OpsPlan, run_ops, run_scaling
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.targets import open_report
from fastweights.lab.bench.timing import Budget
from fastweights.lab.bench.training import TrainPlan, run_training
from fastweights.render.docstrings import first_paragraph
from fastweights.runs.checkpoint import model_folder

QUICK = Budget(seconds=0.1, runs=5)
WIDE = 170
Row = dict[str, Any]
Target = Callable[[Report, Namespace, torch.device], None]


def bench(parser: ArgumentParser) -> Callable[[Namespace, Console], None]:
    """Measure time, error and memory beside other libraries and beside this machine's ceilings."""
    targets = parser.add_subparsers(metavar="TARGET", required=True)
    for name, declare in _TARGETS.items():
        summary = first_paragraph(declare) or name
        target = targets.add_parser(name, help=summary, description=summary)
        target.add_argument(
            "--out", type=Path, help=f"JSON file (default: runs/bench/{name}-<commit>.json)"
        )
        run = declare(target)
        target.set_defaults(target=name, measure=run, quick=False)
    return _bench


def _ops(parser: ArgumentParser) -> Target:
    """Every recurrence, forward and with backward, beside its peers."""
    _add_common(parser)
    parser.add_argument(
        "--scaling", action="store_true", help="instead: our time against T, from 512 to 64k tokens"
    )
    parser.add_argument("--first", action="store_true", help="only the first of each case's sizes")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--seconds",
        type=float,
        default=Budget.seconds,
        help="per contender, after its warm-up (default: %(default)s)",
    )
    return _run_ops


def _decode(parser: ArgumentParser) -> Target:
    """One token: of a rule, a mixer and a model; and how flat it stays."""
    _add_common(parser)
    _add_own_mixer(parser)
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="follow time and state for N tokens"
    )
    parser.add_argument(
        "--compile", action="store_true", help="decode models by torch.compile too (minutes)"
    )
    return _run_decode


def _train(parser: ArgumentParser) -> Target:
    """Training steps of small models of equal size, eager and compiled."""
    _add_common(parser)
    _add_own_mixer(parser)
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    return _run_train


def _gpu(parser: ArgumentParser) -> Target:
    """What benchmarks/gpu.py measures, on one NVIDIA GPU."""
    parser.add_argument(
        "--seconds", type=float, default=GpuPlan.seconds, help="time in all (default: %(default)s)"
    )
    return _run_gpu


def _mesa(parser: ArgumentParser) -> Target:
    """Mesa at fixed steps and at tolerances: time, steps and error; with a checkpoint, its loss by
    position.
    """
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, short times: a check, not a measurement"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="a run, checkpoint or model folder with Mesa layers"
    )
    default = MesaPlan()
    parser.add_argument(
        "--parts",
        nargs="+",
        default=default.parts,
        choices=default.parts,
        help="without a checkpoint",
    )
    parser.add_argument(
        "--text", default=default.text, help="whose last tenth is read (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=default.tokens, help="of it (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, default=default.length, help="of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=Budget.seconds,
        help="per contender, after its warm-up (default: %(default)s)",
    )
    return _run_mesa


_TARGETS: dict[str, Callable[[ArgumentParser], Target]] = {
    "ops": _ops,
    "decode": _decode,
    "train": _train,
    "mesa": _mesa,
    "gpu": _gpu,
}


def _add_common(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, short times: a check, not a measurement"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="only what matches, such as 'decay*' or mesa"
    )


def _add_own_mixer(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--mixer",
        dest="only",
        type=mixer_name,
        default=SUPPRESS,
        metavar="PACKAGE.MODULE:CLASS",
        help="only this one",
    )


def _run_ops(report: Report, chosen: Namespace, device: torch.device) -> None:
    memory = 0.0 if chosen.no_memory else OpsPlan.memory_limit
    budget = QUICK if chosen.quick else Budget(chosen.seconds)
    plan = OpsPlan(
        chosen.quick, chosen.only, first=chosen.first, budget=budget, memory_limit=memory
    )
    (run_scaling if chosen.scaling else run_ops)(report, plan, device)


def _run_decode(report: Report, chosen: Namespace, device: torch.device) -> None:
    plan = DecodePlan(
        chosen.quick,
        chosen.only,
        QUICK if chosen.quick else Budget(),
        chosen.tokens,
        chosen.compile,
    )
    run_decode(report, plan, device)
    flat = [row for row in report.rows if row["type"] == "FlatnessRow"]
    if flat:
        plot_flatness(flat, report.path.with_suffix(".png"))


def _run_train(report: Report, chosen: Namespace, device: torch.device) -> None:
    compiled = not chosen.eager
    plan = (
        TrainPlan.quick(chosen.only, compiled=compiled)
        if chosen.quick
        else TrainPlan(chosen.only, compiled=compiled)
    )
    run_training(report, plan, device)


def _run_mesa(report: Report, chosen: Namespace, device: torch.device) -> None:
    checkpoint = None if chosen.checkpoint is None else model_folder(chosen.checkpoint)
    budget = QUICK if chosen.quick else Budget(chosen.seconds)
    sizes = {"tokens": chosen.tokens, "length": chosen.length}
    plan = MesaPlan(
        chosen.quick, checkpoint, chosen.text, **sizes, budget=budget, parts=tuple(chosen.parts)
    )
    run_mesa(report, plan, device)


def _run_gpu(report: Report, chosen: Namespace, device: torch.device) -> None:
    run_gpu(report, GpuPlan(seconds=chosen.seconds), device)


def _bench(chosen: Namespace, console: Console) -> None:
    device = torch.device("cuda" if chosen.target == "gpu" else "cpu")
    if chosen.target == "gpu" and not torch.cuda.is_available():
        raise ValueError("bench gpu needs an NVIDIA GPU, and torch sees none")
    path = chosen.out or _default_path(chosen)
    settings = {"quick": chosen.quick}
    report = open_report(chosen.target, path, settings, device, _Live(console), quick=chosen.quick)
    chosen.measure(report, chosen, device)
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
    """A line per row as it comes."""

    console: Console

    def __call__(self, row: Row) -> None:
        line = "  ".join(
            filter(None, (f"{c.name} {c.cell(row)}" if c.cell(row) else "" for c in _COLUMNS))
        )
        self.console.print(Text(f"{row['group']}: {line}"), soft_wrap=True)


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
    _Column("× GLA", "over_gla", _number("{:.2f}")),
    _Column("per step", "over_gla_per_step", _number("{:.2f}")),
    _Column("γ", "gamma", str),
    _Column("× base", "over", _number("{:.2f}")),
    _Column("fallbacks", "fallbacks", _number("{:.1%}")),
    _Column("steps", "steps", _number("{:.1f}")),
    _Column("loss", "loss", _number("{:.4f}")),
    _Column("tokens/s", "tokens_per_second", _number("{:,.0f}")),
    _Column("error", "error", _number("{:.1e}")),
    _Column("of gradients", "gradient_error", _number("{:.1e}")),
    _Column("host waits", "syncs", str),
    _Column(
        "peak", "peak_bytes", partial(_with_unit, units=(("GB", 1e9), ("MB", 1e6), ("kB", 1e3)))
    ),
    _Column("slope", "slope", _number("{:.3f}")),
    _Column("slope above", "upper_slope", _number("{:.3f}")),
    _Column("growth", "growth", _number("{:.2f}")),
    _Column("note", "note", str),
    _Column("failed", "reason", str),
)


def _together(rows: list[Row]) -> list[list[Row]]:
    """Rows for one table each: a group of several contenders, or neighbouring groups of one row."""
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
        table.add_row(*([] if one else [row["group"]]), *(Text(c.cell(row)) for c in shown))
    return table
