"""What softmax models of transformers compute in several passes over memory, in fewer: RMSNorms,
rotary positions and gated MLPs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.engines.transformers.norms import all_float32, normalize, plain_calls
from fastweights.engines.transformers.places import FunctionPlace, find_place, is_modelling_file
from fastweights.engines.transformers.substitute import MARK, Call, Substitute, Switch
from fastweights.ops import rotate


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``[b h t w]`` and ``[b g t w]`` by ``[b t w]``, in halves."""
    covered = unsqueeze_dim == 1 and cos.ndim == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
    if not covered or not all_float32(q, k, cos, sin):
        return NotImplemented
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned_q, turned_k = (rotate(s.transpose(1, 2), cos, sin).transpose(1, 2) for s in (q, k))
    return turned_q, turned_k


def _rotary_calls() -> Iterator[Call]:
    for batch in (1, 2):
        cos, sin = torch.randn(2, batch, 5, 8)
        yield Call((torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), cos, sin))


def gate_and_project(self: Any, x: Tensor) -> Tensor:
    """``[… d]`` of an MLP with a SiLU gate, which is written over where no gradient wants it."""
    if type(self.act_fn) is not nn.SiLU:
        return NotImplemented
    gate, up = self.gate_proj(x), self.up_proj(x)
    if gate.requires_grad or up.requires_grad:
        return self.down_proj(F.silu(gate) * up)
    return self.down_proj(F.silu(gate, inplace=True).mul_(up))


def _mlp_calls() -> Iterator[Call]:
    gate, up, down = (
        nn.Linear(*widths).requires_grad_(False) for widths in ((5, 8), (5, 8), (8, 5))
    )
    layers = {"gate_proj": gate, "up_proj": up, "down_proj": down, "act_fn": nn.SiLU()}
    yield Call((SimpleNamespace(**layers), torch.randn(2, 3, 5)))


ROTARY = Substitute("apply_rotary_pos_emb", rotate_heads, _rotary_calls)

METHODS = {"RMSNorm": (normalize, plain_calls), "MLP": (gate_and_project, _mlp_calls)}
"""What may take the place of a class's forward, by the end of the class's name."""


def merge_passes(model: nn.Module) -> tuple[str, ...]:
    """Put ours into the files of a model, where it computes the same; norms and positions in
    float32 without gradients take one pass there from now on.

    Returns:
        what was replaced, ``family.function`` or ``family.Class.forward``
    """
    found = list(_substitutes(model))
    agree = [(place, ours) for place, ours in found if ours.disagreement(place.function) is None]
    for place, ours in agree:
        place.put(ours.put_before(place.function, Switch()))
    return tuple(sorted(place.name for place, _ in agree))


def _substitutes(model: nn.Module) -> Iterator[tuple[FunctionPlace, Substitute]]:
    """Places in the files of a model, and what may take them."""
    classes: dict[type, None] = dict.fromkeys(map(type, model.modules()))
    files: dict[ModuleType, None] = dict.fromkeys(sys.modules[one.__module__] for one in classes)
    for file in filter(lambda one: is_modelling_file(one.__name__), files):
        names = [one.__name__ for one in classes if one.__module__ == file.__name__]
        methods = [
            Substitute(f"{name}.forward", *ours)
            for name in names
            for kind, ours in METHODS.items()
            if name.endswith(kind)
        ]
        for ours in (ROTARY, *methods):
            place: Any = find_place(file, ours.name)
            if place is not None and not hasattr(place.function, MARK):
                yield place, ours
