"""Feature maps: what they approximate, and how far their numbers reach."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cases import normal
from fastweights.features import PositiveRandom, RandomFourier, cos_sin_features, orthogonal, taylor
from tolerances import assert_close


def vectors(count: int, width: int, seed: int) -> Tensor:
    return normal(1, count, 1, width, generator=Generator().manual_seed(seed))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT if q.dim() == 2 else torch.einsum("bthf,bshf->ts", q, k)).double()


def test_taylor_is_exp_to_the_second_order() -> None:
    q, k = vectors(4, 5, 0), vectors(6, 5, 1)
    s = scores(q, k)
    assert taylor(q).shape[-1] == 1 + 5 + 15
    assert_close(scores(taylor(q), taylor(k)), 1 + s + s.square() / 2, "φ(q)·φ(k)")


def test_turned_weighs_channels_by_the_cosine_of_the_angle_between() -> None:
    q, k = vectors(3, 4, 0), vectors(3, 4, 1)
    angle = (
        torch.arange(3.0, dtype=torch.float64)[None, :, None, None]
        * torch.tensor([0.1, 0.2, 0.5, 2.0]).double()
    )
    want = torch.einsum(
        "bthf,bshf,tsf->ts", q, k, (angle[0, :, None, 0] - angle[0, None, :, 0]).cos()
    )
    assert_close(scores(cos_sin_features(q, angle), cos_sin_features(k, angle)), want, "φ(q)·φ(k)")


def test_orthogonal_rows_within_a_block() -> None:
    rows = orthogonal(6, 4, seed=0)
    gram = rows @ rows.mT
    for block in (gram[:4, :4], gram[4:, 4:]):
        assert_close(block, torch.diag(block.diagonal()), "gram")
    assert (orthogonal(6, 4, seed=0) == rows).all()
    assert (orthogonal(6, 4, seed=5) != rows).any()


def test_orthogonal_rows_are_isotropic() -> None:
    rows = orthogonal(40_000, 4, seed=0)
    assert rows.mean(0).abs().max() < 0.02
    assert (rows.mT @ rows / len(rows) - torch.eye(4)).abs().max() < 0.02


def test_positive_random_features_tend_to_softmax() -> None:
    q, k = 0.5 * vectors(5, 4, 0), 0.5 * vectors(7, 4, 1)
    want = scores(q, k).softmax(-1)

    def distance(features: int) -> float:
        errors = []
        for seed in range(0, 40, 2):
            phi = PositiveRandom(4, features, seed)
            weights = scores(phi.query(q), phi.key(k))
            errors.append((weights / weights.sum(-1, keepdim=True) - want).norm().item())
        return sum(errors) / len(errors)

    few, many = distance(16), distance(4096)
    assert many < few / 4
    assert many < 0.1


def test_random_fourier_features_tend_to_the_gaussian_kernel() -> None:
    q, k = F.normalize(vectors(5, 4, 0), dim=-1), F.normalize(vectors(7, 4, 1), dim=-1)
    want = torch.exp(-torch.cdist(q[0, :, 0], k[0, :, 0]).square() / 2)
    phi = RandomFourier(1, 4, 20_000, seed=0)
    assert (scores(phi(q), phi(k)) - want).abs().max() < 0.02
    assert_close(phi.least(), torch.tensor([[math.exp(-2)]]), "least")
    assert (want >= phi.least().item()).all()


@pytest.mark.parametrize("width", [4, 64, 256])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_positive_random_features_stay_in_float32(width: int, size: float) -> None:
    phi = PositiveRandom(width, 32, seed=0)
    x = (size * vectors(9, width, 0) * width**-0.25).float().requires_grad_()
    q, k = phi.query(x), phi.key(x)
    assert torch.isfinite(q).all()
    assert torch.isfinite(k).all()
    assert (q.amax(-1) == 1).all()
    (gradient,) = torch.autograd.grad(scores(q, k).sum(), x)
    assert torch.isfinite(gradient).all()


def test_positive_random_features_meet_a_key_on_its_frequency() -> None:
    phi = PositiveRandom(256, 32, seed=0)
    k = phi.key(phi.omega[None, :, None])
    assert torch.isfinite(k.square().sum())
