"""The norms in Triton beside torch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.kernels import only, select
from fastweights.ops import LayerNorm, RMSNorm, layer_normalize, rms_normalize
from fastweights.ops.normalization import center_by_torch, normalize_by_torch
from poison import poisoned_memory
from triton_checks import TOLERANCE, relative

EPS = 1e-5
NORMS = {
    "RMSNorm": (RMSNorm, rms_normalize, normalize_by_torch),
    "LayerNorm": (LayerNorm, layer_normalize, center_by_torch),
}
every_norm = pytest.mark.parametrize("norm", NORMS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(norm: str, *streams: Tensor | None, silu: bool = False) -> None:
    """Outputs and gradients of x, weight and gate."""
    rule, normalize, exactly = NORMS[norm]
    given = [None if s is None else s.clone().requires_grad_() for s in streams]
    exact = [None if s is None else s.double().requires_grad_() for s in streams]
    x, weight, gate = given
    with poisoned_memory(), only(f"{norm} (Triton)"):
        y = normalize(x, weight, EPS, gate, silu=silu)
        d_y = torch.randn_like(y.float())
        (y * d_y).sum().backward()
    wanted = exactly(rule(exact[0], exact[1], EPS, exact[2], silu))
    (wanted * d_y.double()).sum().backward()
    limit = TOLERANCE[x.dtype]
    assert y.shape == x.shape
    assert relative(y, wanted) <= limit
    for name, found, want in zip(("x", "weight", "gate"), given, exact, strict=True):
        if found is not None:
            assert found.grad.dtype == found.dtype
            assert relative(found.grad, want.grad) <= limit, name


def streams(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape) + 0.3, torch.rand(shape[-1]) + 0.5, torch.randn(shape)


@every_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_weight_and_a_gate(norm: str, dtype: torch.dtype) -> None:
    compare(norm, *(s.to(dtype) for s in streams(2, 50, 3, 24)), silu=True)


@every_norm
def test_with_less(norm: str) -> None:
    x, weight, gate = streams(3, 70, 16)
    compare(norm, x, None, None)
    compare(norm, x, weight, None)
    compare(norm, x, None, gate)


@every_norm
def test_one_row_is_more_than_a_tile(norm: str) -> None:
    compare(norm, *streams(20, 2500), silu=True)


def test_rows_with_gaps_and_a_wider_weight() -> None:
    x, weight, gate = streams(5, 6, 40)
    compare("RMSNorm", x[..., :20].bfloat16(), weight[:20], gate[..., 20:])
    compare("RMSNorm", x.transpose(0, 1), weight, None)


def test_gradients_are_found_for_the_leaves_alone() -> None:
    x, weight, gate = streams(5, 16)
    gate.requires_grad_()
    with only("RMSNorm (Triton)"):
        rms_normalize(x, weight, EPS, gate).sum().backward()
    assert gate.grad is not None
    assert weight.grad is None


@every_norm
def test_gradients_of_gradients(norm: str) -> None:
    found = []
    for kernel in (f"{norm} (Triton)", f"{norm} (torch)"):
        leaves = [s.requires_grad_() for s in streams(3, 16)]
        with only(kernel):
            y = NORMS[norm][1](leaves[0], leaves[1], EPS, leaves[2], silu=True).pow(3).sum()
        (d_x,) = torch.autograd.grad(y, leaves[0], create_graph=True)
        found.append(torch.autograd.grad(d_x.square().sum(), leaves))
    for got, want in zip(*found, strict=True):
        assert relative(got, want.double()) < 1e-5


def test_refusals() -> None:
    x, weight, gate = streams(2, 16)
    assert select(RMSNorm(x, weight, EPS, gate)).name == "RMSNorm (Triton)"
    assert select(RMSNorm(x.double(), weight, EPS)).name == "RMSNorm (torch)"
    assert select(LayerNorm(torch.randn(1, 20000), None, EPS)).name == "LayerNorm (torch)"
    assert select(LayerNorm(x, weight, EPS, gate[:1])).name == "LayerNorm (torch)"
