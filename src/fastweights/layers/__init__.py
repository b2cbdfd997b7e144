"""The pieces that projections are made of."""

from fastweights.layers.arguments import choose, head_width, require_fraction
from fastweights.layers.context import TokenContext
from fastweights.layers.convolution import PreviousToken, ShortConvolution, TokenShift
from fastweights.layers.functions import (
    accumulate_dtype,
    both_ways,
    head_numbers,
    l2_normalize,
    log_gate,
    split_heads,
    upcast,
)
from fastweights.layers.levels import LevelWeights
from fastweights.layers.linear import Linear, project_each, project_pairs
from fastweights.layers.mlp import MLP, MLPS, GatedMLP, LowRank
from fastweights.layers.norms import NORMS, Gate, HeadNorm, SiLUGate, WholeNorm
from fastweights.layers.pooling import POOLINGS
from fastweights.layers.rotary import Rope, rotary
from fastweights.recurrence.mapped import elu_plus_one

__all__ = [
    "MLP",
    "MLPS",
    "NORMS",
    "POOLINGS",
    "Gate",
    "GatedMLP",
    "HeadNorm",
    "LevelWeights",
    "Linear",
    "LowRank",
    "PreviousToken",
    "Rope",
    "ShortConvolution",
    "SiLUGate",
    "TokenContext",
    "TokenShift",
    "WholeNorm",
    "accumulate_dtype",
    "both_ways",
    "choose",
    "elu_plus_one",
    "head_numbers",
    "head_width",
    "l2_normalize",
    "log_gate",
    "project_each",
    "project_pairs",
    "require_fraction",
    "rotary",
    "split_heads",
    "upcast",
]
