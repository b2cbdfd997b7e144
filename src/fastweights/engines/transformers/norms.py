"""The RMSNorms of linear models: several passes over float32 copies there, one here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.engines.transformers.substitute import Call, Substitute
from fastweights.ops import rms_normalize

WEIGHED = (
    "BailingHybridRMSNorm",
    "BambaRMSNorm",
    "FalconH1RMSNorm",
    "FalconMambaRMSNorm",
    "Glm5NextTextRMSNorm",
    "GraniteMoeHybridRMSNorm",
    "InklingRMSNorm",
    "Inkling2RMSNorm",
    "JambaRMSNorm",
    "KimiLinearRMSNorm",
    "Lfm2RMSNorm",
    "Lfm2MoeRMSNorm",
    "MambaRMSNorm",
    "Mamba2RMSNorm",
    "MiniMaxRMSNorm",
    "NemotronHRMSNorm",
    "OlmoHybridRMSNorm",
    "ZambaRMSNorm",
    "Zamba2RMSNorm",
)
"""x / √(mean x² + ε) ⊙ weight."""
BARE = (
    "FalconMambaWeightlessRMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5RMSNorm",
    "Qwen3_5MoeRMSNorm",
    "RecurrentGemmaRMSNorm",
)
"""A method of their own, `_norm`, that knows no weight."""
GATED_BEFORE = (
    "BambaRMSNormGated",
    "GraniteMoeHybridRMSNormGated",
    "MambaRMSNormGated",
    "NemotronHRMSNormGated",
    "Zamba2RMSNormGated",
)
"""Of x ⊙ SiLU(gate), in groups of channels (Mamba-2)."""
GATED_BEHIND = {
    "BailingHybridRMSNormGated": "sigmoid",
    "Glm5NextTextRMSNormGated": "sigmoid",
    "KimiLinearRMSNormGated": "sigmoid",
    "OlmoHybridRMSNormGated": "silu",
    "Qwen3NextRMSNormGated": "silu",
    "Qwen3_5RMSNormGated": "silu",
    "Qwen3_5MoeRMSNormGated": "silu",
    "Qwen4ExpTextRMSNormGated": "silu",
}
"""Then multiplied by the gate, and by what."""
EPS = 1e-6


def normalize(self: Any, hidden_states: Tensor) -> Tensor:
    """``[… d]`` of any class in `WEIGHED`."""
    if not all_float32(hidden_states, self.weight):
        return NotImplemented
    return rms_normalize(hidden_states, self.weight, self.variance_epsilon)


def normalize_bare(self: Any, x: Tensor) -> Tensor:
    """``[… d]``, by `_norm` of a class in `BARE`."""
    return rms_normalize(x, None, self.eps) if all_float32(x) else NotImplemented


def normalize_gated(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """``[… d]`` of a class in `GATED_BEFORE`, whose groups have `group_size` channels each, or are
    one in versions that know none.
    """
    if not all_float32(hidden_states, self.weight, gate):
        return NotImplemented
    x = hidden_states if gate is None else hidden_states * F.silu(gate)
    size = getattr(self, "group_size", x.shape[-1])
    if size == x.shape[-1]:
        return rms_normalize(x, self.weight, self.variance_epsilon)
    groups = rms_normalize(x.unflatten(-1, (-1, size)), None, self.variance_epsilon)
    return self.weight * groups.flatten(-2)


def normalize_then_gate(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """``[… d]`` of a class in `GATED_BEHIND`."""
    known = self.activation in ("silu", "sigmoid")
    if not known or not all_float32(hidden_states, self.weight, gate):
        return NotImplemented
    if self.activation == "sigmoid":
        return rms_normalize(hidden_states, self.weight, self.variance_epsilon, gate.sigmoid())
    return rms_normalize(hidden_states, self.weight, self.variance_epsilon, gate, silu=True)


def all_float32(*streams: Tensor | None) -> bool:
    """Whether ours is for them: narrower ones theirs converts and rounds between its steps, as
    weights were trained with.
    """
    return all(s is None or s.dtype is torch.float32 for s in streams)


def _module(**settings: Any) -> SimpleNamespace:
    weight = torch.rand(12) + 0.5
    return SimpleNamespace(weight=weight, variance_epsilon=EPS, eps=EPS, **settings)


def plain_calls() -> Iterator[Call]:
    """Of `normalize`."""
    for size in (1.0, 1e-3):
        yield Call((_module(), size * torch.randn(2, 3, 12)))


def _before_calls() -> Iterator[Call]:
    for gate in (torch.randn(2, 3, 12), None):
        yield Call((_module(group_size=12), torch.randn(2, 3, 12), gate))
        grouped = (_module(group_size=4), torch.randn(2, 3, 12), gate)
        yield Call(grouped, reads="group_size")


def _behind_calls(activation: str) -> Iterator[Call]:
    yield Call((_module(activation=activation), *torch.randn(2, 2, 3, 12)))


NORMS = (
    *(Substitute(f"{name}.forward", normalize, plain_calls) for name in WEIGHED),
    *(Substitute(f"{name}._norm", normalize_bare, plain_calls) for name in BARE),
    *(Substitute(f"{name}.forward", normalize_gated, _before_calls) for name in GATED_BEFORE),
    *(
        Substitute(f"{name}.forward", normalize_then_gate, partial(_behind_calls, activation))
        for name, activation in GATED_BEHIND.items()
    ),
)
