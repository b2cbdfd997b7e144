"""Rank-one rules that are constant in time, as convolutions beside their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor

from fastweights.kernels import explain, only
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import DPLR
from tolerances import array, assert_close

NAME = "convolution by FFT (torch)"


def record(dtype: torch.dtype, before: bool, tied: bool, t: int = 9) -> DPLR:
    g = Generator().manual_seed(0)
    q, w, a, b, phase = (torch.randn(1, 1, 3, 4, generator=g, dtype=dtype) for _ in range(5))
    log_decay = -phase.abs() if not dtype.is_complex else torch.complex(-phase.abs(), phase.real)
    v = torch.randn(2, t, 3, 2, generator=g, dtype=torch.float64)
    return DPLR(q, w, v, a / 4, None if tied else b / 4, log_decay, before)


def both_ways(rule: DPLR, state: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Output, state and gradients by the convolution, and step by step."""
    found = []
    for evaluated in (lambda r: evaluate(r, state), lambda r: evaluate(r, state, Recurrent())):
        leaves = [s.clone().requires_grad_() for s in (rule.w, rule.a, rule.v)]
        w, a, v = leaves
        o, after = evaluated(replace(rule, w=w, a=a, v=v))
        loss = o.real.sin().sum() + after.real.cos().sum()
        found.append([o.detach(), after.detach(), *torch.autograd.grad(loss, leaves)])
    return found[0], found[1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_is_the_rule(dtype: torch.dtype, before: bool, tied: bool) -> None:
    state = torch.randn(2, 3, 4, 2, generator=Generator().manual_seed(1), dtype=dtype)
    with only(NAME):
        got, want = both_ways(record(dtype, before, tied), state)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_close(one, array(other), str(number))


def test_what_differs_between_tokens_is_refused() -> None:
    rule = record(torch.float64, before=True, tied=False)
    padded = rule.keep(torch.ones(2, 9, dtype=torch.bool))
    assert f"{NAME}: taken" in str(explain(rule))
    assert f"{NAME}: refused: its w, b, log_decay differ between tokens" in str(explain(padded))
    assert "1 tokens; a convolution needs more" in str(explain(rule[:1]))
