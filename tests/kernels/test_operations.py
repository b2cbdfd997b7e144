"""Operations of layers are records of the kernel table: `explain` and `only` know them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from extension import compiled
from fastweights import kernels
from fastweights.kernels import explain, only, takers
from fastweights.kernels.native import library
from fastweights.methods import evaluate
from fastweights.ops import Convolution, LayerNorm, RMSNorm, convolve, rms_normalize
from fastweights.recurrence import Decay
from tolerances import assert_close

ELSEWHERE = "its streams are on cpu, not cuda or meta"


def convolution(t: int, dtype: torch.dtype = torch.float32, taps: int = 4) -> Convolution:
    torch.manual_seed(0)
    tail, x = torch.randn(2, taps - 1, 5), torch.randn(2, t, 5)
    return Convolution(tail.to(dtype), x.to(dtype), torch.randn(taps, 5).to(dtype))


@compiled
def test_every_kernel_says_whether_it_takes_an_operation() -> None:
    assert explain(convolution(1)).splitlines() == [
        f"short convolution (Triton): refused: {ELSEWHERE}",
        "short convolution, one token (torch): taken",
        "short convolution (compiled): possible",
        "short convolution (torch): possible",
    ]
    assert explain(convolution(7, torch.float64)).splitlines() == [
        f"short convolution (Triton): refused: {ELSEWHERE}",
        "short convolution, one token (torch): refused: it has several tokens",
        "short convolution (compiled): refused: a Tensor of torch.float64 on cpu is not plain"
        " float32 or bfloat16",
        "short convolution (torch): taken",
    ]
    assert "(compiled): refused: it has 65 taps, more than C takes" in explain(
        convolution(7, taps=65)
    )
    assert explain(RMSNorm(torch.randn(3, 4), None, 1e-5)).splitlines() == [
        f"RMSNorm (Triton): refused: {ELSEWHERE}",
        "RMSNorm (compiled): taken",
        "RMSNorm (torch): possible",
    ]
    assert explain(LayerNorm(torch.randn(3, 4), None, 1e-5)).splitlines() == [
        f"LayerNorm (Triton): refused: {ELSEWHERE}",
        "LayerNorm (torch): taken",
    ]


def test_without_the_extension_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    for operation in (convolution(7), RMSNorm(torch.randn(3, 4), None, 1e-5)):
        assert "the compiled extension is missing" in explain(operation)
        assert "(torch)" in takers(operation)[0].name


@pytest.mark.parametrize("t", [1, 6])
def test_all_kernels_of_a_convolution_agree(t: int) -> None:
    given = convolution(t)
    found: list[Tensor] = []
    for kernel in takers(given):
        leaves = [s.clone().requires_grad_() for s in given[:3]]
        with only(kernel.name):
            y, tail = convolve(*leaves)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(y.sin().sum(), leaves)]))
        expected = kernels.select(given).compute(given)
        assert_close(y, expected[0], kernel.name)
        assert torch.equal(tail, expected[1]), kernel.name
    for gradients in found:
        assert_close(gradients, found[0], "gradients")


def test_all_kernels_of_a_norm_agree() -> None:
    x, weight = torch.randn(3, 9), torch.randn(9)
    wanted = rms_normalize(x, weight, 1e-5)
    for kernel in takers(RMSNorm(x, weight, 1e-5)):
        with only(kernel.name):
            assert_close(rms_normalize(x, weight, 1e-5), wanted, kernel.name)


@pytest.mark.parametrize("t", [1, 6])
def test_bias_and_silu_stand_behind_every_convolution(t: int) -> None:
    given, bias = convolution(t), torch.randn(5)
    for kernel in takers(given):
        with only(kernel.name):
            plain, _ = convolve(*given[:3])
            y, _ = convolve(*given[:3], None, bias, silu=True)
        assert torch.equal(y, F.silu(plain + bias)), kernel.name


@pytest.mark.parametrize("rule", [RMSNorm, LayerNorm])
def test_a_gate_stands_behind_every_norm(rule: type[RMSNorm] | type[LayerNorm]) -> None:
    x, weight, gate = torch.randn(3, 9), torch.randn(9), torch.randn(3, 9, requires_grad=True)
    for kernel in takers(rule(x, weight, 1e-5)):
        plain = kernel.compute(rule(x, weight, 1e-5))
        assert torch.equal(kernel.compute(rule(x, weight, 1e-5, gate)), plain * gate)
        gated = kernel.compute(rule(x, weight, 1e-5, gate, silu=True))
        assert torch.equal(gated, plain * F.silu(gate)), kernel.name


def test_a_kernel_of_one_family_leaves_the_others_free() -> None:
    """Inside a mixer, recurrences can be restricted without a word on its convolutions."""
    q = torch.randn(1, 6, 1, 2)
    with only("chunk loop (torch)"):
        assert kernels.select(Decay(q, q, q, None)).name == "chunk loop (torch)"
        free = takers(convolution(6))[0]
        assert kernels.select(convolution(6)) is free
        with only("short convolution (torch)"):
            assert kernels.select(convolution(6)).name == "short convolution (torch)"
            assert kernels.select(Decay(q, q, q, None)).name == "chunk loop (torch)"
            evaluate(Decay(q, q, q, None))
    with (
        only("short convolution, one token (torch)"),
        pytest.raises(LookupError, match="no kernel takes this record"),
    ):
        convolve(*convolution(6))
