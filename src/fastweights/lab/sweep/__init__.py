"""Sweeps: models × tasks × learning rates × seeds, run in parallel, resumed, added up and drawn."""

from fastweights.lab.sweep.figures import AXES, draw
from fastweights.lab.sweep.folder import Folder, sweep
from fastweights.lab.sweep.plan import Contender, Plan, Run, read
from fastweights.lab.sweep.pool import Failed, Here, Local, Pool, Ray
from fastweights.lab.sweep.summary import Best, best
from fastweights.lab.sweep.trainer import Point, Row, fit

__all__ = [
    "AXES",
    "Best",
    "Contender",
    "Failed",
    "Folder",
    "Here",
    "Local",
    "Plan",
    "Point",
    "Pool",
    "Ray",
    "Row",
    "Run",
    "best",
    "draw",
    "fit",
    "read",
    "sweep",
]
