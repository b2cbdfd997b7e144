"""What softmax attention is replaced by, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastweights.features import Elu, Exponential, Hedgehog, LearnedFeatures, Relu
from fastweights.layers import choose
from fastweights.linearize.convert.branch import LinearBranch, WindowedBranch
from fastweights.linearize.convert.rules import (
    GatedDeltaBranch,
    GLABranch,
    MesaBranch,
    MetaLABranch,
    SupraBranch,
)
from fastweights.linearize.convert.sites import AttentionLayer

FEATURE_MAPS: Mapping[str, type[LearnedFeatures]] = {
    "hedgehog": Hedgehog,
    "exp": Exponential,
    "elu": Elu,
    "relu": Relu,
}
"""Learnt feature maps by the names that configurations use."""

RULES: Mapping[str, type[LinearBranch]] = {
    "windowed": WindowedBranch,
    "gla": GLABranch,
    "metala": MetaLABranch,
    "gated_deltanet": GatedDeltaBranch,
    "mesa": MesaBranch,
    "supra": SupraBranch,
}
"""What a layer can become, by name."""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """What softmax is replaced by: plain data, kept in the model's configuration.

    Attributes:
        features: φ: a name of `FEATURE_MAPS`
        feature_dim: columns of each W_φ (φ has twice as many, for x and -x); None: half of the
            head's width
        window: softmax over so many tokens, linear attention to all before them; 0: linear
            attention alone
        shared: one normaliser for both sides, or False: one for each (the workshop paper's eq.
            8)
        per_query_head: φ_k for every query head, as in LoLCATs' own code, instead of every key
            head: a larger state
        rule: a name of `RULES`; window, shared and per_query_head are of "windowed" alone
    """

    features: str = "hedgehog"
    feature_dim: int | None = None
    window: int = 64
    shared: bool = True
    per_query_head: bool = False
    rule: str = "windowed"

    def __post_init__(self) -> None:
        choose("features", self.features, FEATURE_MAPS)
        choose("rule", self.rule, RULES)
        if self.feature_dim is not None and self.feature_dim < 1:
            raise ValueError(
                f"feature_dim = {self.feature_dim}; use a number of columns, or None for half a"
                " head"
            )
        if self.window < 0:
            raise ValueError(
                f"window = {self.window}; a number of tokens, 0 for linear attention alone"
            )

    @property
    def phi(self) -> type[LearnedFeatures]:
        return FEATURE_MAPS[self.features]

    def columns(self, site: AttentionLayer) -> int:
        """Of each W_φ."""
        return max(site.head_dim // 2, 1) if self.feature_dim is None else self.feature_dim

    def branch(self, site: AttentionLayer) -> LinearBranch:
        """The module for one attention, in float32."""
        return RULES[self.rule](site, self).float()
