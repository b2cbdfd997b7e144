"""What softmax models of transformers compute in several passes over memory, in one: RMSNorms and
rotary positions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.engines.transformers.norms import all_float32, normalize, plain_calls
from fastweights.engines.transformers.places import Place, find_place, is_modelling_file
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


ROTARY = Substitute("apply_rotary_pos_emb", rotate_heads, _rotary_calls)


def merge_passes(model: nn.Module) -> tuple[str, ...]:
    """Put ours into the files of a model, where it computes the same; float32 without gradients
    takes one pass there from now on.

    Returns:
        what was replaced, ``family.function`` or ``family.Class.forward``
    """
    found = list(_substitutes(model))
    agree = [(place, ours) for place, ours in found if ours.disagreement(place.function) is None]
    for place, ours in agree:
        place.put(ours.put_before(place.function, Switch()))
    return tuple(sorted(place.name for place, _ in agree))


def _substitutes(model: nn.Module) -> Iterator[tuple[Place, Substitute]]:
    """Places in the files of a model, and what may take them."""
    classes: dict[type, None] = dict.fromkeys(map(type, model.modules()))
    files: dict[ModuleType, None] = dict.fromkeys(sys.modules[one.__module__] for one in classes)
    for file in filter(lambda one: is_modelling_file(one.__name__), files):
        norms = (one.__name__ for one in classes if one.__module__ == file.__name__)
        names = (f"{name}.forward" for name in norms if name.endswith("RMSNorm"))
        candidates = [ROTARY, *(Substitute(name, normalize, plain_calls) for name in names)]
        for ours in candidates:
            place: Any = find_place(file, ours.name)
            if place is not None and not hasattr(place.function, MARK):
                yield place, ours
