"""Mixtures of experts as their papers have them: token by token, expert by expert, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastweights.layers import Experts
from tolerances import array


def mixture(x: np.ndarray, layer: Experts, mlp: Callable[[np.ndarray, Any], np.ndarray]) -> Any:
    """Σ_e w_e MLP_e(x) of every token ``[… d]``, and what all tokens pass.

    Args:
        x: What the tokens are.
        layer: The weights, and how they are routed.
        mlp: An MLP of one token by an expert's weights.
    """
    flat = x.reshape(-1, x.shape[-1])
    return np.stack([_of_token(token, layer, mlp) for token in flat]).reshape(x.shape)


def _of_token(x: np.ndarray, layer: Experts, mlp: Callable[..., np.ndarray]) -> np.ndarray:
    how = layer.router.routing
    z = array(layer.router.W.weight) @ x
    s = 1 / (1 + np.exp(-z)) if how.sigmoid else np.exp(z) / np.exp(z).sum()
    merit = s if layer.router.bias is None else s + array(layer.router.bias)
    size = how.count // how.groups
    of_group = [sum(sorted(merit[g * size : (g + 1) * size])[-2:]) for g in range(how.groups)]
    groups = np.argsort(of_group)[-how.chosen_groups :]
    allowed = [e for e in range(how.count) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -merit[e])[: how.chosen]
    total = sum(s[e] for e in chosen) if how.normalized else 1.0
    read = x if layer.W_in is None else array(layer.W_in.weight) @ x
    y = sum(how.scale * s[e] / total * mlp(read, layer.experts[e]) for e in chosen)
    y = y if layer.W_out is None else array(layer.W_out.weight) @ y
    if layer.shared is not None:
        gate = 1.0
        if layer.w_shared is not None:
            gate = 1 / (1 + np.exp(-array(layer.w_shared.weight) @ x))
        y = y + gate * mlp(x, layer.shared)
    return y
