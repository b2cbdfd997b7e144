"""Make the softmax attention of pretrained language models linear: LoLCATs (Zhang et al., 2024) and
others."""

from fastweights.linearize.convert.attention import branches, use_mode
from fastweights.linearize.convert.attention_layers import (
    AttentionLayer,
    CannotLinearize,
    find_attention_layers,
)
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import StateLayer, cache_bytes
from fastweights.linearize.convert.config import FEATURE_MAPS, LinearAttentionConfig
from fastweights.linearize.convert.conversion import linearize
from fastweights.linearize.convert.handover import convert_cache, read_by_softmax, restore_cache
from fastweights.linearize.convert.landmarks import place_landmarks
from fastweights.linearize.convert.lolcats import from_lolcats
from fastweights.linearize.convert.model_classes import register_model_types
from fastweights.linearize.convert.modes import (
    AttentionCall,
    LinearOnly,
    Mode,
    OtherRecurrence,
    Student,
    Teacher,
    WindowOnly,
)
from fastweights.linearize.convert.rules import RULES
from fastweights.linearize.convert.window_budget import share_windows

register_model_types()

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
    "convert_cache",
    "find_attention_layers",
    "from_lolcats",
    "linearize",
    "place_landmarks",
    "read_by_softmax",
    "restore_cache",
    "share_windows",
    "use_mode",
]
