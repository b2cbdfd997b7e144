"""The pieces that projections are made of."""

from fastweights.layers.arguments import choose, fraction, head_width
from fastweights.layers.context import Past
from fastweights.layers.convolution import ShortConvolution, TokenShift
from fastweights.layers.functions import (
    both_ways,
    elu_plus_one,
    heads,
    log_gate,
    per_head,
    precise,
    unit,
    wide,
)
from fastweights.layers.mlp import MLP, MLPS, GatedMLP, LowRank
from fastweights.layers.norms import NORMS, HeadNorm, WholeNorm
from fastweights.layers.pooling import POOLINGS
from fastweights.layers.rotary import Rope, rotary

__all__ = [
    "MLP",
    "MLPS",
    "NORMS",
    "POOLINGS",
    "GatedMLP",
    "HeadNorm",
    "LowRank",
    "Past",
    "Rope",
    "ShortConvolution",
    "TokenShift",
    "WholeNorm",
    "both_ways",
    "choose",
    "elu_plus_one",
    "fraction",
    "head_width",
    "heads",
    "log_gate",
    "per_head",
    "precise",
    "rotary",
    "unit",
    "wide",
]
