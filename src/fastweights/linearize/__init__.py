"""Pretrained language models with softmax attention, made linear: LoLCATs (Zhang et al., 2024) and others."""

from fastweights.linearize.analog import FEATURE_MAPS, RULES, Analog
from fastweights.linearize.attach import branches, linearize
from fastweights.linearize.branch import LinearBranch
from fastweights.linearize.cache import StateLayer, cache_bytes
from fastweights.linearize.errors import CannotLinearize
from fastweights.linearize.lolcats import from_lolcats
from fastweights.linearize.modes import Altered, Call, Linear, LinearOnly, Mode, Teacher, WindowOnly, running
from fastweights.linearize.sites import Site, find_sites

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
