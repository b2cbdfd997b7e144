"""Import checkpoints of other libraries, and write their formats: one file per family of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fastweights.importers.bamba import bamba, falcon_h1, granitemoehybrid
from fastweights.importers.export import export_model
from fastweights.importers.fla import (
    comba,
    deltanet,
    deltaproduct,
    gdn,
    gla,
    gsa,
    hgrn2,
    kda,
    mesa_net,
    mom,
    raven,
    retnet,
)
from fastweights.importers.gemma3 import gemma3_text
from fastweights.importers.jamba import jamba
from fastweights.importers.kimi_linear import bailing_hybrid, kimi_linear
from fastweights.importers.lfm2 import lfm2, lfm2_moe
from fastweights.importers.llama import llama, mistral, qwen2, qwen3
from fastweights.importers.loglinear import log_linear_mamba2
from fastweights.importers.mamba import falcon_mamba, mamba, mamba2
from fastweights.importers.metala import metala
from fastweights.importers.minimax import minimax
from fastweights.importers.nemotron_h import nemotron_h
from fastweights.importers.olmo_hybrid import olmo_hybrid
from fastweights.importers.plan import ImportPlan, ProgressCallback
from fastweights.importers.qwen3_next import qwen3_5_moe_text, qwen3_5_text, qwen3_next
from fastweights.importers.recurrent_gemma import recurrent_gemma
from fastweights.importers.rwkv import rwkv
from fastweights.importers.rwkv6 import rwkv6
from fastweights.importers.rwkv7 import rwkv7
from fastweights.importers.settings import SETTINGS
from fastweights.importers.source import (
    CheckpointSource,
    FolderSource,
    InMemorySource,
    locate_checkpoint,
    tokenizer_files,
)
from fastweights.importers.xlstm import xlstm
from fastweights.importers.zamba import zamba, zamba2
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

FAMILIES: dict[str, Callable[[CheckpointSource], ImportPlan]] = {
    "bailing_hybrid": bailing_hybrid,
    "bamba": bamba,
    "comba": comba,
    "delta_net": deltanet,
    "falcon_h1": falcon_h1,
    "falcon_mamba": falcon_mamba,
    "gated_deltanet": gdn,
    "gated_deltaproduct": deltaproduct,
    "gemma3_text": gemma3_text,
    "gla": gla,
    "granitemoehybrid": granitemoehybrid,
    "gsa": gsa,
    "hgrn2": hgrn2,
    "jamba": jamba,
    "kda": kda,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "llama": llama,
    "log_linear_mamba2": log_linear_mamba2,
    "mamba": mamba,
    "mamba2": mamba2,
    "mesa_net": mesa_net,
    "metala": metala,
    "minimax": minimax,
    "mistral": mistral,
    "mom": mom,
    "nemotron_h": nemotron_h,
    "olmo_hybrid": olmo_hybrid,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_next": qwen3_next,
    "raven": raven,
    "recurrent_gemma": recurrent_gemma,
    "retnet": retnet,
    "rwkv": rwkv,
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
    "xlstm": xlstm,
    "zamba": zamba,
    "zamba2": zamba2,
}
"""The model_type of a config.json → how such a checkpoint becomes one of ours."""


def import_model(
    model: str | Path | PreTrainedModel,
    dtype: torch.dtype | None = None,
    watch: ProgressCallback = lambda done, of: None,
) -> FastWeightsForCausalLM:
    """Convert another library's language model into one of this library that computes the same.

    Memory holds the new model and one tensor of the old one.

    Args:
        model: A folder with config.json and safetensors files, a GGUF file, a name on the Hugging
            Face hub, or a loaded model of transformers. Pickled weights are not read.
        dtype: The dtype of all weights; None for that of the checkpoint's embeddings.
        watch: Called after every tensor with (tensors done, tensors in all).

    Returns:
        The new model.

    Raises:
        ValueError: If the type of model is not in `FAMILIES`, has settings that ours cannot state,
            or has tensors that are missing, left over or of another shape.
    """
    source = (
        InMemorySource(model)
        if isinstance(model, PreTrainedModel)
        else FolderSource(locate_checkpoint(model))
    )
    kind = source.settings.kind
    _require_family(kind)
    return FAMILIES[kind](source).build_model(source, dtype, watch)


def _require_family(kind: str) -> None:
    if kind == FastWeightsConfig.model_type:
        raise ValueError("this is a model of fastweights already; use it as it is")
    if kind.startswith("linearized_"):
        raise ValueError(
            f"a {kind} model is transformers' own, and has no importer; import the softmax model"
            " that it was made from, or use it as it is"
        )
    if kind not in FAMILIES:
        raise ValueError(
            f"no importer for model_type {kind!r}; there are {', '.join(sorted(FAMILIES))}"
        )


__all__ = [
    "FAMILIES",
    "SETTINGS",
    "export_model",
    "import_model",
    "locate_checkpoint",
    "tokenizer_files",
]
