"""Pretrained language models with softmax attention, made linear: LoLCATs (Zhang et al., 2024) and
others.
"""

from fastweights.linearize.convert.analog import FEATURE_MAPS, RULES, Analog
from fastweights.linearize.convert.attach import branches, linearize
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import StateLayer, cache_bytes
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.lolcats import from_lolcats
from fastweights.linearize.convert.modes import (
    Altered,
    Call,
    Linear,
    LinearOnly,
    Mode,
    Teacher,
    WindowOnly,
    running,
)
from fastweights.linearize.convert.sites import Site, find_sites

__all__ = [
    "FEATURE_MAPS",
    "RULES",
    "Altered",
    "Analog",
    "Call",
    "CannotLinearize",
    "Linear",
    "LinearBranch",
    "LinearOnly",
    "Mode",
    "Site",
    "StateLayer",
    "Teacher",
    "WindowOnly",
    "branches",
    "cache_bytes",
    "find_sites",
    "from_lolcats",
    "linearize",
    "running",
]
