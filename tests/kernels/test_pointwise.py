"""Sums and gates between a token's products, and calls that are made as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fastweights.kernels.native import library
from fastweights.kernels.native.abi import PointwiseCall, PointwiseKind

pytestmark = pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")


@pytest.mark.parametrize("count", [1, 7, 16, 1537])
def test_a_sum_has_torchs_bits(count: int) -> None:
    a, b = torch.randn(2, count, generator=torch.Generator().manual_seed(count))
    wanted = a + b
    library.call("fw_pointwise", PointwiseCall(count, PointwiseKind.SUM, a, b, a))
    assert torch.equal(a, wanted)


RELATIVE = {PointwiseKind.SILU_GATED: 1e-6, PointwiseKind.GELU_GATED: 5e-6}
"""The exponent of GELU has a cube in it."""
GATES = {
    PointwiseKind.SILU_GATED: F.silu,
    PointwiseKind.GELU_GATED: partial(F.gelu, approximate="tanh"),
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("count", [1, 7, 16, 1537])
def test_a_gate_is_that_of_its_kind(count: int, kind: PointwiseKind) -> None:
    a, b = 5 * torch.randn(2, count, generator=torch.Generator().manual_seed(count))
    wanted = GATES[kind](a.double()) * b
    library.call("fw_pointwise", PointwiseCall(count, kind, a, b, to := a.clone()))
    torch.testing.assert_close(to, wanted.float(), rtol=RELATIVE[kind], atol=1e-7)


@pytest.mark.parametrize("kind", GATES)
def test_gates_of_any_size(kind: PointwiseKind) -> None:
    a = torch.tensor([-torch.inf, -1e30, -200.0, -88.0, 0.0, 88.0, 1e30, torch.inf, torch.nan])
    to, b = torch.empty_like(a), torch.ones_like(a)
    library.call("fw_pointwise", PointwiseCall(len(a), kind, a, b, to))
    finite = a.isfinite()
    torch.testing.assert_close(to[finite], GATES[kind](a[finite]), rtol=1e-6, atol=1e-30)
    assert to[-2] == torch.inf
    assert to[-1].isnan()


def test_a_chain_makes_its_calls_in_order() -> None:
    x, one = torch.zeros(9), torch.ones(9)
    add = library.PreparedCall("fw_pointwise", PointwiseCall(9, PointwiseKind.SUM, x, one, x))
    double = library.PreparedCall("fw_pointwise", PointwiseCall(9, PointwiseKind.SUM, x, x, x))
    calls: list[Callable[[], object]] = [add, double, double, lambda: x.mul_(-1), add, double]
    chained = library.chain(calls)
    assert len(chained) == 3
    for call in [*chained, *library.chain(chained[:1])]:
        call()
    assert x.tolist() == [((-4 + 1) * 2 + 1) * 4.0] * 9
