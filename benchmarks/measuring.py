"""What the scripts of this folder have in common: their options, their files and their times."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastweights.lab.bench.report import Report, open_report
from fastweights.lab.bench.timing import Budget, WallClock, require_all, time_in_turn

RESULTS = Path(__file__).parent / "results"
Act = Callable[[], object]


def options(text: str | None, name: str, rounds: int = 0) -> ArgumentParser:
    """A parser that knows --out, by default results/`name`.json, and --rounds, if there are any."""
    parser = ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender")
    return parser


def begin(name: str, chosen: Namespace, **settings: Any) -> Report:
    """The report of a script on one thread of the CPU, which goes on where it was stopped."""
    torch.set_num_threads(1)
    rounds = {"rounds": chosen.rounds} if hasattr(chosen, "rounds") else {}
    return open_report(name, chosen.out, rounds | settings)


def milliseconds(acts: Mapping[str, Act], rounds: int) -> dict[str, float]:
    """The median of each, called in turn."""
    found = time_in_turn(acts, WallClock(), Budget(seconds=1e9, runs=rounds))
    return {name: 1e3 * times.median for name, times in require_all(found).items()}
