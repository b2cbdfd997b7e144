"""The configuration of the linear attention that replaces softmax attention, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from fastweights.features import (
    Elu,
    Exponential,
    Hedgehog,
    Landmarks,
    LearnedFeatures,
    Relu,
    SkipElu,
    SkipExponential,
    SkipRelu,
)
from fastweights.layers import choose
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.ranges import NON_NEGATIVE_INTEGER, POSITIVE_INTEGER

FEATURE_MAPS: Mapping[str, type[LearnedFeatures | Landmarks]] = {
    "hedgehog": Hedgehog,
    "exp": Exponential,
    "elu": Elu,
    "relu": Relu,
    "exp-skip": SkipExponential,
    "elu-skip": SkipElu,
    "relu-skip": SkipRelu,
    "landmarks": Landmarks,
}
"""Feature maps φ by the names that configurations use."""

RULE_PAPERS: Mapping[str, str] = {
    "windowed": "LoLCATs (Zhang et al., 2024)",
    "gla": "Gated linear attention (Yang et al., 2024)",
    "metala": "MetaLA (Chou et al., 2024)",
    "lightning": "Lightning attention (Qin et al., 2024), a fixed decay per head",
    "gated_deltanet": "Gated DeltaNet (Yang et al., 2025)",
    "kda": "Kimi Delta Attention (Kimi Team, 2025), gated DeltaNet with a decay per channel",
    "mesa": "MesaNet (von Oswald et al., 2025)",
    "supra": "SUPRA (Mercat et al., 2024)",
}
"""What a layer can become, and whose it is; `registry.RULES` has the module of each."""

GATES: Mapping[str, str] = {
    "learnt": "linear in v, constant initially",
    "pooled": "averages of k's channels, without parameters (Liger, Lan et al., 2025)",
}
"""What gates are made of, by the names that configurations use."""
POSITIONS: Mapping[str, str] = {
    "everywhere": "in all layers, as in the softmax model",
    "linear": "in linear layers alone; layers that stay softmax have none (HyPE, HALO, 2026)",
}
"""Where rotary positions are, by the names that configurations use."""
GATED = ("gla", "gated_deltanet", "kda", "mesa")
"""The rules that have gates."""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The linear attention that replaces softmax attention: plain data, kept in the model's
    ``config.json``.

    The default is LoLCATs' layer (Zhang et al., 2024, arXiv 2410.10254, section 3): softmax over a
    window of the last tokens, linear attention with Hedgehog's feature map to all tokens before
    them. Any rule can take linear attention's place there.

    Attributes:
        features: The feature map φ, a name of `FEATURE_MAPS`. Those of "landmarks" are placed by
            `place_landmarks`, not trained from scratch, and belong to "windowed" alone.
        feature_dim: Columns of each matrix W_φ; φ(x) has twice as many channels, for x and -x, or
            twice as many landmarks. None for half of the head's width, which alone fits the maps
            with a skip connection.
        window: Number of tokens that softmax attention reaches over; the rule covers all tokens
            before them. 0 leaves the rule alone.
        shared: True for one normaliser for both sides together (LoLCATs), False for one for each
            side (the workshop paper's eq. 8). Rules without a normaliser never share one:
            "gated_deltanet", "kda" and "mesa".
        per_query_head: True for a φ_k for every query head, as in LoLCATs' own code; False for one
            for every key head, which makes the state smaller. Only of "windowed" without sinks.
        rule: The recurrence, a name of `RULE_PAPERS`.
        sinks: Number of tokens at the beginning that softmax sees for ever, beside the window's or
            beside landmarks.
        gates: What the gates of the rule are made of, a name of `GATES`.
        convolution: Taps of the causal convolutions of q and k before the rule (LAWCAT); 0 for
            none. Only without a window, which sees keys as they are.
        positions: Where rotary positions are, a name of `POSITIONS`.
        log_scale: a of log_a(t + a), by which a layer that stays softmax, and has no positions,
            multiplies the scores of the query at position t outside of training (HyPE, arXiv
            2601.22156, eq. 11): texts longer than those of the training are told apart as well.
            0 for none.
        windows_by_head: Whether key heads get windows of their own, which `share_windows` finds and
            which are together as long as if each had `window`.
        head_windows: In row i, the windows of layer i's key heads, once they are found; `window`
            holds for layers without a row.
        head_columns: In row i, `feature_dim` of layer i's key heads, likewise.

    Raises:
        ValueError: If a name is unknown, a size impossible or two fields exclude each other; the
            message says what there is.
    """

    features: str = "hedgehog"
    feature_dim: int | None = None
    window: int = 64
    shared: bool = True
    per_query_head: bool = False
    rule: str = "windowed"
    sinks: int = 0
    gates: str = "learnt"
    convolution: int = 0
    positions: str = "everywhere"
    log_scale: int = 0
    windows_by_head: bool = False
    head_windows: tuple[tuple[int, ...], ...] = ()
    head_columns: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        choose("features", self.features, FEATURE_MAPS)
        choose("rule", self.rule, RULE_PAPERS)
        choose("gates", self.gates, GATES)
        choose("positions", self.positions, POSITIONS)
        NON_NEGATIVE_INTEGER.require(sinks=self.sinks, convolution=self.convolution)
        if self.feature_dim is not None and self.feature_dim not in POSITIVE_INTEGER:
            raise ValueError(
                f"feature_dim = {self.feature_dim}; use a number of columns, or None for half a"
                " head"
            )
        if self.window not in NON_NEGATIVE_INTEGER:
            raise ValueError(
                f"window = {self.window}; a number of tokens, 0 for linear attention alone"
            )
        self._require_parts_that_fit()

    def _require_parts_that_fit(self) -> None:
        if self.rule == "supra" and self.window:
            raise ValueError(
                f"rule = 'supra' with window = {self.window}: SUPRA's norm per head takes the place"
                " of all normalisers, softmax's too; take window = 0, or rule = 'lightning', which"
                " has a fixed decay per head as well"
            )
        if self.sinks and not self.window and self.features != "landmarks":
            raise ValueError(
                f"sinks = {self.sinks} with window = 0: sinks are seen by the softmax of a window,"
                " or stand beside landmarks; take a window above 0, features = 'landmarks', or no"
                " sinks"
            )
        if self.sinks and self.per_query_head:
            raise ValueError(
                f"sinks = {self.sinks} with per_query_head: LoLCATs' own layers, which have a φ_k"
                " for every query head, have no sinks; leave one of them out"
            )
        if self.features == "landmarks" and (
            self.rule != "windowed" or not self.shared or self.per_query_head
        ):
            raise ValueError(
                f"features = 'landmarks' with rule = {self.rule!r}, shared = {self.shared},"
                f" per_query_head = {self.per_query_head}: landmarks stand for the keys of a key"
                " head, and are weighed with those of the window; take rule = 'windowed', shared ="
                " True and per_query_head = False"
            )
        if self.convolution and (self.window or self.per_query_head):
            raise ValueError(
                f"convolution = {self.convolution} with window = {self.window} and per_query_head ="
                f" {self.per_query_head}: a window sees keys as they are, and LoLCATs' own layers"
                " have no convolutions; take window = 0 and a φ_k for every key head, or leave"
                " convolution out"
            )
        if self.log_scale and (self.log_scale < 2 or self.positions != "linear"):
            raise ValueError(
                f"log_scale = {self.log_scale} with positions = {self.positions!r}: it is the base"
                " of a logarithm, 2 or more, such as HyPE's 500, and takes the place of positions;"
                " take positions = 'linear', or log_scale = 0"
            )
        if self.windows_by_head and not (self.has_window and self.features == "landmarks"):
            raise ValueError(
                f"windows_by_head with features = {self.features!r} and window = {self.window}:"
                " windows are divided by what placed landmarks leave out; take features ="
                " 'landmarks' and a window above 0, or leave windows_by_head out"
            )
        if self.convolution == 1:
            raise ValueError(
                "convolution = 1 is a factor of q and k, and no neighbour of a token; take 2 or"
                " more taps, such as LAWCAT's 4, or 0 for none"
            )
        if self.gates == "pooled" and self.rule not in GATED:
            raise ValueError(
                f"gates = 'pooled' with rule = {self.rule!r}, which has no gates; take one of"
                f" {', '.join(GATED)}"
            )

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Return the configuration that a model's ``config.json`` holds.

        Before there were sinks, all rules but "windowed" had no window, whatever was stored of one.
        """
        alone = "sinks" not in stored and stored.get("rule", "windowed") != "windowed"
        given: dict[str, Any] = {**stored, "window": 0} if alone else dict(stored)
        for name in ("head_windows", "head_columns"):
            given[name] = tuple(map(tuple, stored.get(name, ())))
        return cls(**given)

    def windows_of(self, attention: AttentionLayer) -> tuple[int, ...]:
        """The windows of a layer's key heads.

        Raises:
            ValueError: If `head_windows` has more or fewer for this layer.
        """
        return self._own(attention, "head_windows", self.window)

    def heads_of(self, attention: AttentionLayer) -> tuple[tuple[int, int | None], ...]:
        """The windows of a layer's key heads, and their `feature_dim`."""
        columns = self._own(attention, "head_columns", self.feature_dim)
        return tuple(zip(self.windows_of(attention), columns, strict=True))

    def of_head(self, window: int, columns: int | None) -> Self:
        """Return the configuration of heads that have these, and none of their own."""
        return replace(self, window=window, feature_dim=columns, head_windows=(), head_columns=())

    def _own(self, attention: AttentionLayer, field: str, shared: Any) -> tuple[Any, ...]:
        rows = getattr(self, field)[attention.layer : attention.layer + 1]
        own = (rows[0] if rows else ()) or (shared,) * attention.kv_heads
        if len(own) != attention.kv_heads:
            raise ValueError(
                f"{field} has {own} for layer {attention.layer}, which has"
                f" {attention.kv_heads} key heads; give each of them one number"
            )
        return own

    @property
    def has_window(self) -> bool:
        """Whether softmax attends to the last tokens beside the rule."""
        return self.window > 0

    @property
    def phi(self) -> type[LearnedFeatures | Landmarks]:
        """The class of the feature map."""
        return FEATURE_MAPS[self.features]

    def columns(self, attention: AttentionLayer) -> int:
        """The columns of each W_φ in a layer that attends as `attention` does."""
        return max(attention.head_dim // 2, 1) if self.feature_dim is None else self.feature_dim
