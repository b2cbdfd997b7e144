"""Which module a configuration asks for: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Mapping

from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import LinearBranch, WindowedBranch
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.rules import (
    GatedDeltaBranch,
    GLABranch,
    MesaBranch,
    MetaLABranch,
    SupraBranch,
)

RULES: Mapping[str, type[LinearBranch]] = {
    "windowed": WindowedBranch,
    "gla": GLABranch,
    "metala": MetaLABranch,
    "gated_deltanet": GatedDeltaBranch,
    "mesa": MesaBranch,
    "supra": SupraBranch,
}
"""What a layer can become, by the names that configurations use."""


def branch_of(config: LinearAttentionConfig, attention: AttentionLayer) -> LinearBranch:
    """A new module, in float32, that takes the place of one softmax attention.

    Args:
        config: what the attention becomes.
        attention: the heads, widths and scaling of the attention that it replaces.
    """
    return RULES[config.rule](attention, config).float()
