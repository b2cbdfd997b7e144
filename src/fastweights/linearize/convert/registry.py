"""The table from configurations to branches: the only file that imports all of them."""

from __future__ import annotations

from collections.abc import Mapping

from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import LinearBranch, WindowedBranch
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.rules import (
    GatedDeltaBranch,
    GLABranch,
    KDABranch,
    LightningBranch,
    MesaBranch,
    MetaLABranch,
    SupraBranch,
    UndecayedBranch,
)

RULES: Mapping[str, type[LinearBranch]] = {
    "windowed": WindowedBranch,
    "gla": GLABranch,
    "metala": MetaLABranch,
    "lightning": LightningBranch,
    "gated_deltanet": GatedDeltaBranch,
    "kda": KDABranch,
    "mesa": MesaBranch,
    "supra": SupraBranch,
}
"""What a layer can become, by the names that configurations use."""


def branch_of(config: LinearAttentionConfig, attention: AttentionLayer) -> LinearBranch:
    """Build the module, in float32, that replaces one softmax attention.

    Args:
        config: The linear attention.
        attention: Heads, widths and scaling of the attention that it replaces.
    """
    beside_sinks = config.rule == "windowed" and config.sinks > 0
    return (UndecayedBranch if beside_sinks else RULES[config.rule])(attention, config).float()
