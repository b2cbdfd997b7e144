"""Sweeps: models × tasks × learning rates × seeds, run in parallel, resumed, added up and drawn."""

from fastweights.sweep.figures import AXES, draw
from fastweights.sweep.folder import Folder, sweep
from fastweights.sweep.plan import Contender, Plan, Run, read
from fastweights.sweep.pool import Failed, Here, Local, Pool, Ray
from fastweights.sweep.summary import Best, best
from fastweights.sweep.trainer import Point, Row, fit

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
