"""The pieces that projections are made of."""

from fastweights.layers.arguments import choose, head_width, require_fraction
from fastweights.layers.context import LayerStream, TokenContext
from fastweights.layers.convolution import PreviousToken, ShortConvolution, TokenShift, TokenShifts
from fastweights.layers.experts import MLPS, Experts, Router, Routing, writers_of
from fastweights.layers.functions import (
    LARGEST,
    LEAST_LOG,
    POOLINGS,
    accumulate_dtype,
    both_ways,
    bounded_exp,
    complement_root,
    gated_halves,
    head_numbers,
    init_steps,
    l2_normalize,
    log_gate,
    softplus_power,
    split_heads,
    upcast,
)
from fastweights.layers.head_weights import (
    LevelWeights,
    Ranks,
    SoftplusDecay,
    init_softplus_decay,
    softplus_decay,
)
from fastweights.layers.implicit_filter import ImplicitFilter
from fastweights.layers.linear import Linear, project_each, project_pairs
from fastweights.layers.mlp import MLP, GatedMLP, LowRank, factorized
from fastweights.layers.norms import (
    NORMS,
    CenteredNorm,
    Gate,
    GroupNorm,
    HeadNorm,
    SiLUGate,
    WholeNorm,
)
from fastweights.layers.rotary import Rope
from fastweights.layers.routed import RoutedContext
from fastweights.layers.wide import WideParameters
from fastweights.recurrence.mapped import elu_plus_one

__all__ = [
    "LARGEST",
    "LEAST_LOG",
    "MLP",
    "MLPS",
    "NORMS",
    "POOLINGS",
    "CenteredNorm",
    "Experts",
    "Gate",
    "GatedMLP",
    "GroupNorm",
    "HeadNorm",
    "ImplicitFilter",
    "LayerStream",
    "LevelWeights",
    "Linear",
    "LowRank",
    "PreviousToken",
    "Ranks",
    "Rope",
    "RoutedContext",
    "Router",
    "Routing",
    "ShortConvolution",
    "SiLUGate",
    "SoftplusDecay",
    "TokenContext",
    "TokenShift",
    "TokenShifts",
    "WholeNorm",
    "WideParameters",
    "accumulate_dtype",
    "both_ways",
    "bounded_exp",
    "choose",
    "complement_root",
    "elu_plus_one",
    "factorized",
    "gated_halves",
    "head_numbers",
    "head_width",
    "init_softplus_decay",
    "init_steps",
    "l2_normalize",
    "log_gate",
    "project_each",
    "project_pairs",
    "require_fraction",
    "softplus_decay",
    "softplus_power",
    "split_heads",
    "upcast",
    "writers_of",
]
