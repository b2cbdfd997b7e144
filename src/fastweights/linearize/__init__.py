"""Pretrained language models with softmax attention, made linear: LoLCATs (Zhang et al., 2024) and
others.
"""

from fastweights.linearize.convert.analog import FEATURE_MAPS, RULES, LinearAttentionConfig
from fastweights.linearize.convert.attach import branches, linearize
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import StateLayer, cache_bytes
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.lolcats import from_lolcats
from fastweights.linearize.convert.modes import (
    AttentionCall,
    LinearOnly,
    Mode,
    OtherRecurrence,
    Student,
    Teacher,
    WindowOnly,
    use_mode,
)
from fastweights.linearize.convert.sites import AttentionLayer, find_attention_layers

__all__ = [
    "FEATURE_MAPS",
    "RULES",
    "AttentionCall",
    "AttentionLayer",
    "CannotLinearize",
    "LinearAttentionConfig",
    "LinearBranch",
    "LinearOnly",
    "Mode",
    "OtherRecurrence",
    "StateLayer",
    "Student",
    "Teacher",
    "WindowOnly",
    "branches",
    "cache_bytes",
    "find_attention_layers",
    "from_lolcats",
    "linearize",
    "use_mode",
]
