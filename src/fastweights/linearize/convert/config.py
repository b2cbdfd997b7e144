"""The configuration of the linear attention that replaces softmax attention, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastweights.features import Elu, Exponential, Hedgehog, LearnedFeatures, Relu
from fastweights.layers import choose
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.runs.ranges import NON_NEGATIVE_INTEGER, POSITIVE_INTEGER

FEATURE_MAPS: Mapping[str, type[LearnedFeatures]] = {
    "hedgehog": Hedgehog,
    "exp": Exponential,
    "elu": Elu,
    "relu": Relu,
}
"""Learnt feature maps φ by the names that configurations use."""

RULE_PAPERS: Mapping[str, str] = {
    "windowed": "LoLCATs (Zhang et al., 2024)",
    "gla": "Gated linear attention (Yang et al., 2024)",
    "metala": "MetaLA (Chou et al., 2024)",
    "gated_deltanet": "Gated DeltaNet (Yang et al., 2025)",
    "mesa": "MesaNet (von Oswald et al., 2025)",
    "supra": "SUPRA (Mercat et al., 2024)",
}
"""What a layer can become, and whose it is; `registry.RULES` has the module of each."""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The linear attention that replaces softmax attention: plain data, kept in the model's
    ``config.json``.

    The default is LoLCATs' layer (Zhang et al., 2024, arXiv 2410.10254, section 3): softmax over a
    window of the last tokens, linear attention with Hedgehog's feature map to all tokens before
    them.

    Attributes:
        features: The feature map φ, a name of `FEATURE_MAPS`.
        feature_dim: Columns of each matrix W_φ; φ(x) has twice as many channels, for x and -x. None
            for half of the head's width.
        window: Number of tokens that softmax attention reaches over; linear attention covers all
            tokens before them. 0 leaves linear attention alone.
        shared: True for one normaliser for both sides together (LoLCATs), False for one for each
            side (the workshop paper's eq. 8).
        per_query_head: True for a φ_k for every query head, as in LoLCATs' own code; False for one
            for every key head, which makes the state smaller.
        rule: The recurrence, a name of `RULE_PAPERS`. ``window``, ``shared`` and ``per_query_head``
            apply to "windowed" only.

    Raises:
        ValueError: If a name is unknown or a size impossible; the message says which ones there
            are.
    """

    features: str = "hedgehog"
    feature_dim: int | None = None
    window: int = 64
    shared: bool = True
    per_query_head: bool = False
    rule: str = "windowed"

    def __post_init__(self) -> None:
        choose("features", self.features, FEATURE_MAPS)
        choose("rule", self.rule, RULE_PAPERS)
        if self.feature_dim is not None and self.feature_dim not in POSITIVE_INTEGER:
            raise ValueError(
                f"feature_dim = {self.feature_dim}; use a number of columns, or None for half a"
                " head"
            )
        if self.window not in NON_NEGATIVE_INTEGER:
            raise ValueError(
                f"window = {self.window}; a number of tokens, 0 for linear attention alone"
            )

    @property
    def has_window(self) -> bool:
        """Whether softmax attends to the last tokens beside linear attention."""
        return self.rule == "windowed" and self.window > 0

    @property
    def phi(self) -> type[LearnedFeatures]:
        """The class of the feature map."""
        return FEATURE_MAPS[self.features]

    def columns(self, attention: AttentionLayer) -> int:
        """The columns of each W_φ in a layer that attends as `attention` does."""
        return max(attention.head_dim // 2, 1) if self.feature_dim is None else self.feature_dim
