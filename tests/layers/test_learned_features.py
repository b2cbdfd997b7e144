"""Learnt feature maps against the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastweights.features import (
    Elu,
    Exponential,
    Hedgehog,
    LearnedFeatures,
    Relu,
    SkipElu,
    SkipExponential,
    SkipFeatures,
    SkipRelu,
)
from oracles.attention import elu_plus_one, relu
from tolerances import array, assert_close

MAPS: list[tuple[type[LearnedFeatures], Callable[[np.ndarray], np.ndarray]]] = [
    (Hedgehog, lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)),
    (Exponential, np.exp),
    (Elu, elu_plus_one),
    (Relu, relu),
]
each_map = pytest.mark.parametrize(("kind", "f"), MAPS, ids=[kind.__name__ for kind, _ in MAPS])


@each_map
def test_features_are_the_formula(
    kind: type[LearnedFeatures], f: Callable[[np.ndarray], np.ndarray]
) -> None:
    torch.manual_seed(0)
    phi, x = (
        kind(heads=2, width=6, features=4).double(),
        torch.randn(3, 5, 2, 6, dtype=torch.float64),
    )
    torch.nn.init.normal_(phi.W)
    W = array(phi.W).reshape(2, 4, 6)
    z = np.stack([array(x)[:, :, head] @ W[head].T for head in range(2)], 2)
    assert_close(phi(x), np.concatenate([f(z), f(-z)], -1), "φ")


@each_map
def test_features_start_from_the_identity(
    kind: type[LearnedFeatures], f: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = torch.randn(3, 5, 2, 6)
    assert_close(kind(heads=2, width=6, features=4)(x)[..., :4], f(array(x)[..., :4]), "φ")
    assert kind(heads=2, width=6, features=4).bfloat16()(x.bfloat16()).dtype == torch.float32


SKIPS: list[tuple[type[SkipFeatures], Callable[[np.ndarray], np.ndarray]]] = [
    (SkipExponential, np.exp),
    (SkipElu, elu_plus_one),
    (SkipRelu, relu),
]


@pytest.mark.parametrize(("kind", "f"), SKIPS, ids=[kind.__name__ for kind, _ in SKIPS])
def test_a_skip_connection_is_equation_6(
    kind: type[SkipFeatures], f: Callable[[np.ndarray], np.ndarray]
) -> None:
    """φ(x) = f(x W + x) with W of w × w (LoLCATs, workshop); f(x) before training."""
    phi = kind(heads=2, width=6, features=3).double()
    x = torch.randn(3, 5, 2, 6, dtype=torch.float64)
    assert_close(phi(x), f(array(x)), "φ")
    torch.nn.init.normal_(phi.W)
    W = array(phi.W).reshape(2, 6, 6)  # row i of a head's is what makes feature i
    z = np.stack([array(x)[:, :, head] @ W[head].T for head in range(2)], 2)
    assert_close(phi(x), f(z + array(x)), "φ")
    assert phi.size == 6
    with pytest.raises(ValueError, match="as many features as channels"):
        kind(heads=2, width=6, features=2)
