"""Sweeps: models × tasks × learning rates × seeds, trained in parallel, resumed, summarised and
drawn."""

from fastweights.lab.sweep.figures import AXES, draw
from fastweights.lab.sweep.folder import SweepFolder, sweep
from fastweights.lab.sweep.plan import SweepModel, SweepPlan, SweepRun, read_plan
from fastweights.lab.sweep.pool import (
    AllProcesses,
    InProcess,
    Local,
    Pool,
    Ray,
    RunFailure,
    follow,
    leading,
)
from fastweights.lab.sweep.summary import Best, best
from fastweights.lab.sweep.trainer import Point, Row, fit

__all__ = [
    "AXES",
    "AllProcesses",
    "Best",
    "InProcess",
    "Local",
    "Point",
    "Pool",
    "Ray",
    "Row",
    "RunFailure",
    "SweepFolder",
    "SweepModel",
    "SweepPlan",
    "SweepRun",
    "best",
    "draw",
    "fit",
    "follow",
    "leading",
    "read_plan",
    "sweep",
]
