"""RWKV-4 as transformers names its weights (rwkv-4-*-pile)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fastweights.importers.plan import (
    Convert,
    ImportPlan,
    Table,
    TensorSource,
    linear,
    plan_layers,
)
from fastweights.importers.source import CheckpointSource
from fastweights.layers import upcast

EPS = 1e-5
TIME: Table = {
    **linear("mixer_norm", "ln1", bias=True),
    **{
        f"mixer.shift_{ours}.mu": TensorSource(f"attention.time_mix_{theirs}", Tensor.flatten)
        for ours, theirs in {"k": "key", "v": "value", "r": "receptance"}.items()
    },
    "mixer.w": "attention.time_decay",
    "mixer.u": "attention.time_first",
    **{
        f"mixer.W_{ours}.weight": f"attention.{theirs}.weight"
        for ours, theirs in {"k": "key", "v": "value", "r": "receptance", "o": "output"}.items()
    },
}
CHANNEL: Table = {
    **linear("mixer_norm", "ln2", bias=True),
    **{
        f"mixer.shift_{ours}.mu": TensorSource(f"feed_forward.time_mix_{theirs}", Tensor.flatten)
        for ours, theirs in {"k": "key", "r": "receptance"}.items()
    },
    **{
        f"mixer.W_{ours}.weight": f"feed_forward.{theirs}.weight"
        for ours, theirs in {"k": "key", "r": "receptance", "o": "value"}.items()
    },
}


def rwkv(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an RWKV-4 checkpoint.

    Time and channel mixing alternate: two layers of ours for each of theirs. The norm of the
    embeddings is applied to their table. RWKV's halving of the residual stream every few layers,
    against overflow in float16, is left out.
    """
    settings = source.settings
    settings.require("attention_hidden_size", None, settings["hidden_size"])
    settings.require("layer_norm_epsilon", EPS)
    settings.require("tie_word_embeddings", False)
    channel = {"name": "rwkv4_channel", "width": settings["intermediate_size"]}
    return plan_layers(
        source,
        [({"name": "rwkv4"}, TIME), (channel, CHANNEL)] * settings["num_hidden_layers"],
        {},
        around=outer_with_norm(
            "rwkv.embeddings", "rwkv.blocks.0.pre_ln", "rwkv.ln_out", "head", EPS
        ),
        theirs="rwkv.blocks",
        parts=2,
        norm="layer",
        norm_eps=EPS,
        mlp=None,
    )


def outer_with_norm(
    embeddings: str, pre_norm: str, norm: str, head: str, eps: float
) -> dict[str, TensorSource]:
    """Map what stands around the layers, with the norm of the embeddings applied to their table."""
    own = tuple(f"{pre_norm}.{part}" for part in ("weight", "bias"))
    return {
        "model.embed_tokens.weight": TensorSource(f"{embeddings}.weight", _normalize(eps), own),
        "model.norm.weight": TensorSource(f"{norm}.weight"),
        "model.norm.bias": TensorSource(f"{norm}.bias"),
        "lm_head.weight": TensorSource(f"{head}.weight"),
    }


def _normalize(eps: float) -> Convert:
    def convert(embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(upcast(embeddings), weight.shape, upcast(weight), upcast(bias), eps)

    return convert
