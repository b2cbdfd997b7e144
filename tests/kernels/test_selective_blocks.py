"""`Selective` in blocks of time beside the same record with its decay written out at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import kernels
from fastweights.kernels import selective
from fastweights.methods import evaluate
from fastweights.recurrence.selective import Selective

BLOCKS, WHOLE = selective.BLOCKED_SELECTIVE.name, "selective: the plain rule's kernel"


def draw(constant_rate: bool) -> tuple[list[Tensor], Tensor]:
    """The streams of a record with a reset in it, and a state, in float64."""
    b, t, h, n = 2, 75, 3, 4
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay = -normal(b, t, h, 1).exp()
    decay[0, 41] = -torch.inf
    rate = normal(1, 1, h, n) if constant_rate else normal(b, t, h, n)
    streams = [normal(b, t, 1, n), normal(b, t, 1, n), normal(b, t, h, 1), decay, rate.exp()]
    return [s.requires_grad_() for s in streams], normal(b, h, n, 1).requires_grad_()


def found_by(kernel: str, streams: list[Tensor], state: Tensor) -> list[Tensor]:
    """(o, the state, all gradients)"""
    last: Any
    with kernels.only(kernel):
        o, last = evaluate(Selective(*streams), state)
    loss = (o * o.detach().sin()).sum() + last.square().sum()
    return [o, last, *torch.autograd.grad(loss, [*streams, state])]


@pytest.mark.parametrize("constant_rate", [True, False])
def test_blocks_compute_what_the_whole_does(
    monkeypatch: pytest.MonkeyPatch, constant_rate: bool
) -> None:
    monkeypatch.setattr(selective, "BLOCK", 2 * 3 * 4 * 16)
    streams, state = draw(constant_rate)
    for found, expected in zip(
        found_by(BLOCKS, streams, state), found_by(WHOLE, streams, state), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_record_that_fits_the_cache_is_written_out_whole() -> None:
    streams, _ = draw(constant_rate=True)
    assert kernels.select(Selective(*streams)).name == WHOLE
