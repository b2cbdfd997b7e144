"""What the attentions of a linearized model keep of a sequence, known before there is a weight."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fastweights.engines.vllm.layout import PageLayout
from fastweights.linearize import AttentionLayer, LinearAttentionConfig, find_attention_layers
from fastweights.linearize.convert.rules import branch_of


def mark_as_hybrid(config: Any) -> None:
    """Let vLLM see in a configuration whose layers are all full attention that some are linear."""
    if not hasattr(config, "stored_layer_types"):
        config.stored_layer_types = list(config.layer_types)
        converted = {one["layer"] for one in config.linearize["sites"]}
        config.layer_types = [
            "linear_attention" if layer in converted else kind
            for layer, kind in enumerate(config.layer_types)
        ]


def copy_stored(config: Any) -> Any:
    """A copy of a configuration as transformers' models read it, without vLLM's marks."""
    copied = deepcopy(config)
    if hasattr(config, "stored_layer_types"):
        copied.layer_types = config.stored_layer_types
    return copied


@dataclass(frozen=True)
class ServedAttentions:
    """The attentions of a linearized model.

    Attributes:
        linear: Where the tensors of a linear one stand in a page, by the layer's number.
        softmax: The others.
    """

    linear: dict[int, PageLayout]
    softmax: list[AttentionLayer]

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> ServedAttentions:
        """Those of the model of a configuration, in this dtype.

        Raises:
            ValueError: If vLLM's attention cannot do what a softmax layer does.
        """
        analog = LinearAttentionConfig.from_stored(config.linearize["analog"])
        converted = [AttentionLayer(**stored) for stored in config.linearize["sites"]]
        linear = {one.layer: _layout(one, analog, dtype) for one in converted}
        others: list[AttentionLayer] = []
        layers = len(getattr(config, "layer_types", None) or range(config.num_hidden_layers))
        if len(linear) < layers:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy_stored(config), dtype=dtype)
            found = find_attention_layers(model)
            others = [require_served(one) for one in found if one.layer not in linear]
        return cls(linear, others)

    @property
    def page(self) -> int:
        """The bytes of the longest page."""
        return max((layout.nbytes for layout in self.linear.values()), default=0)


@torch.no_grad()
def _layout(
    attention: AttentionLayer, config: LinearAttentionConfig, dtype: torch.dtype
) -> PageLayout:
    with torch.device("meta"):
        branch = branch_of(config, attention)
        return PageLayout.of(branch.kept_before(*attention.zeros(1, dtype)))


def require_served(attention: AttentionLayer) -> AttentionLayer:
    """`attention`, if vLLM's attention can do what it does.

    Raises:
        ValueError: If not.
    """
    reasons = {
        "attention sinks": attention.sinks,
        "attention in chunks": attention.chunked,
        "tokens that see those after them": not attention.causal,
        "several calls in one forward pass": attention.calls > 1,
        "keys and values of another layer": attention.shares,
    }
    refused = next((reason for reason, there in reasons.items() if there), None)
    if refused:
        raise ValueError(
            f"layer {attention.layer} of this model stays softmax with {refused}, which fastweights"
            " does not pass on to vLLM; serve the model by `transformers serve`"
        )
    return attention
