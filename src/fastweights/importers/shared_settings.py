"""What families of transformers state alike of a model of ours."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from fastweights.importers.experts import GROUPED
from fastweights.importers.source import CARRIED, TOKENS
from fastweights.layers import Experts, Rope
from fastweights.layers.experts import Routing
from fastweights.mixers import MLA, SoftmaxAttention
from fastweights.models import FastWeightsForCausalLM

Fields = dict[str, Any]
M = TypeVar("M", bound=nn.Module)


def parts(model: FastWeightsForCausalLM, kind: type[M]) -> list[M]:
    """The modules of this kind in a model's layers, in their order."""
    return [part for part in model.model.layers.modules() if type(part) is kind]


def first(model: FastWeightsForCausalLM, kind: type[M]) -> M:
    """The first module of this kind.

    Raises:
        AttributeError: There is none.
    """
    found = parts(model, kind)
    if not found:
        raise AttributeError(f"no layer has a {kind.__name__}")
    return found[0]


def common(model: FastWeightsForCausalLM) -> Fields:
    """What every family states under the same names."""
    names = ("vocab_size", "hidden_size", "tie_word_embeddings")
    carried = [name for name in CARRIED if getattr(model.config, name, None) is not None]
    return {name: getattr(model.config, name) for name in (*names, *TOKENS, *carried)}


def decoder(model: FastWeightsForCausalLM) -> Fields:
    """What families of decoders with MLPs state under the same names."""
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "rms_norm_eps": model.config.norm_eps,
        "hidden_act": model.config.hidden_act,
        **dense(model),
    }


def dense(model: FastWeightsForCausalLM) -> Fields:
    """The width of MLPs that are not experts, if there are any."""
    for mlp in model.config.layer_mlps:
        if mlp is not None and mlp["name"] != "experts":
            return {"intermediate_size": mlp["width"]}
    return {}


def rope_parameters(rope: Rope, *, partial: bool = False) -> Fields:
    """How transformers states rotary positions; `partial` where the family reads the fraction of
    channels that turn, which others turn all whatever is stated.
    """
    stretch: Fields = {"rope_type": "default"}
    if rope.factor != 1:
        stretch = {"rope_type": "linear", "factor": rope.factor}
    if rope.factor != 1 and rope.context:
        stretch |= {
            "rope_type": "llama3",
            "original_max_position_embeddings": rope.context,
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
        }
    turning = {"partial_rotary_factor": rope.fraction} if partial else {}
    return {"rope_theta": rope.base, **stretch, **turning}


def attention(
    model: FastWeightsForCausalLM,
    kind: type[SoftmaxAttention] = SoftmaxAttention,
    *,
    partial: bool = False,
) -> Fields:
    """How transformers states softmax attention of this kind; `partial` as for the positions."""
    softmax = first(model, kind)
    return {
        "num_attention_heads": softmax.heads,
        "num_key_value_heads": softmax.kv_heads,
        "head_dim": softmax.rope.width,
        "attention_bias": softmax.W_q.bias is not None,
        "rope_parameters": rope_parameters(softmax.rope, partial=partial),
    }


def layer_types(model: FastWeightsForCausalLM, linear: str = "linear_attention") -> list[str]:
    """Which layers are softmax attention, in transformers' words, and which are `linear`."""
    return [
        "full_attention" if isinstance(block.mixer, SoftmaxAttention | MLA) else linear
        for block in model.model.layers
    ]


def expert_width(model: FastWeightsForCausalLM) -> int:
    """Channels inside an expert."""
    return first(model, Experts).experts[0].W_1.out_features  # type: ignore[union-attr]


def grouped_routing(routing: Routing) -> Fields:
    """How families after DeepSeek-V3 state the choice of experts."""
    return {theirs: getattr(routing, ours) for ours, theirs in GROUPED.items()}
