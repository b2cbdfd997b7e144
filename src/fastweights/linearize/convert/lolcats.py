"""Import of the feature maps that LoLCATs' own code trained (github.com/HazyResearch/lolcats)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.attention_layers import CannotLinearize
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.conversion import linearize

NAMES = {
    "feature_map_q.mlp.layer": "phi_q.W",
    "feature_map_k.mlp.layer": "phi_k.W",
    "window_factors": "mix",
}
"""Their parameters of an attention, and ours."""
PARAMETER = re.compile(rf"layers\.(\d+)\.self_attn\.({'|'.join(map(re.escape, NAMES))})$")


def from_lolcats(model: PreTrainedModel, path: str | Path, window: int = 64) -> Any:
    """Linearize a model, in place, with the feature maps that LoLCATs' own code trained.

    These have a φ for every query head, with identity or trained W (no bias, no skip), and γ. That
    code trains on blocks of 64 to 128 tokens and decodes with a window of 64; here both are the
    last `window` tokens. LoRA weights in the file are ignored: apply them with peft.

    Args:
        model: The softmax model that the checkpoint was made from.
        path: A ``*_distill.pt`` or ``*_ft.pt`` of github.com/HazyResearch/lolcats.
        window: Number of tokens that softmax attention reaches over.

    Returns:
        `model` itself, linearized, as `linearize` returns it.

    Raises:
        CannotLinearize: If the file has no feature maps, or they are for layers that do not fit.
    """
    found = _parameters(torch.load(path, map_location="cpu", weights_only=True))
    if not found:
        raise CannotLinearize(
            str(path), f"it has none of {', '.join(NAMES)}", "use the checkpoint of a distillation"
        )
    columns = next(iter(found.values()))["phi_q.W"].shape[2]
    model = linearize(
        model,
        LinearAttentionConfig(feature_dim=columns, window=window, per_query_head=True),
        sorted(found),
    )
    for layer, branch in branches(model).items():
        branch.load_state_dict({name: _ours(x) for name, x in found[layer].items()})
    return model


def _parameters(saved: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    """Our names → their tensors, by layer."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.get("model_state_dict", saved).items():
        if match := PARAMETER.search(name):
            found.setdefault(int(match[1]), {})[NAMES[match[2]]] = tensor
    return found


def _ours(x: Tensor) -> Tensor:
    """W ``[h w f]`` → ``[h·f w 1]``, and window factors ``[1 h 1 1]`` → ``[h]``."""
    return x.mT.flatten(0, 1).unsqueeze(-1) if x.dim() == 3 else x.flatten()
