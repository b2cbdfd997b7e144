"""RWKV-4 as transformers names its weights (rwkv-4-*-pile)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fastweights.importers.plan import ImportPlan, Table, TensorSource, linear, prefix_names
from fastweights.importers.source import CheckpointSource
from fastweights.layers import upcast
from fastweights.models import FastWeightsConfig

EPS = 1e-5
PRE_NORM = tuple(f"rwkv.blocks.0.pre_ln.{part}" for part in ("weight", "bias"))
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
    d = settings["hidden_size"]
    settings.require("attention_hidden_size", None, d)
    settings.require("layer_norm_epsilon", EPS)
    settings.require("tie_word_embeddings", False)
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=d,
        num_hidden_layers=2 * settings["num_hidden_layers"],
        mixers=[
            {"name": "rwkv4"},
            {"name": "rwkv4_channel", "width": settings["intermediate_size"]},
        ],
        norm="layer",
        norm_eps=EPS,
        mlp=None,
        embedding_scale=1.0,
    )
    tensors = {
        "model.embed_tokens.weight": TensorSource(
            "rwkv.embeddings.weight", _apply_pre_norm, PRE_NORM
        ),
        **prefix_names("model.norm", "rwkv.ln_out", {"weight": "weight", "bias": "bias"}),
        "lm_head.weight": TensorSource("head.weight"),
    }
    for layer in range(config.num_hidden_layers):
        tensors |= prefix_names(
            f"model.layers.{layer}", f"rwkv.blocks.{layer // 2}", CHANNEL if layer % 2 else TIME
        )
    return ImportPlan(config, tensors)


def _apply_pre_norm(embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(upcast(embeddings), weight.shape, upcast(weight), upcast(bias), EPS)
