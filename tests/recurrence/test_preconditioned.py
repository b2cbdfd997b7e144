"""The delta rule with preconditioned writes, beside the paper's loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cases import METHODS, normal
from checks import as_tensors, check_states
from fastweights.methods import Auto, evaluate
from fastweights.recurrence import NoFiniteFormError, Preconditioned, ShapeError, Signed
from oracles.deltas import preconditioned
from tolerances import array, assert_close

B, T, H, K, V = 2, 13, 2, 4, 5
SPREAD = 1.7


def streams(width: int = 1) -> dict[str, Tensor]:
    g = Generator().manual_seed(width)

    def some(last: int) -> Tensor:
        return normal(B, T, H, last, generator=g)

    return {
        "q": some(K),
        "k": F.normalize(some(K), dim=-1),
        "v": some(V),
        "beta": some(1).sigmoid(),
        "log_decay": F.logsigmoid(some(width)),
        "rate": some(1).sigmoid(),
        "log_fade": F.logsigmoid(some(1)),
        "center": normal(1, 1, H, 1, generator=g),
    }


def start() -> tuple[Tensor, Tensor]:
    g = Generator().manual_seed(9)
    return normal(B, H, 1, K, generator=g).square(), normal(B, H, K, V, generator=g)


def loop(named: dict[str, Tensor], state: tuple[Tensor, Tensor] | None = None) -> tuple:
    a = {name: array(s) for name, s in named.items()}
    beta, rate = a["beta"][..., 0], a["rate"][..., 0]
    alpha, fade = np.exp(a["log_decay"]), np.exp(a["log_fade"])[..., 0]
    before = None if state is None else (array(state[0]), array(state[1]))
    center = a["center"][0, 0, :, 0]
    return preconditioned(
        *(a["q"], a["k"], a["v"], beta, alpha, rate, fade, center), SPREAD, before
    )


@pytest.mark.parametrize("width", [1, K])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_is_the_loop(width: int, method: object) -> None:
    named = streams(width)
    o, final = evaluate(Preconditioned(**named, spread=SPREAD), start(), method)
    want, after = loop(named, start())
    assert_close(o, want, "o")
    check_states(final, as_tensors(after), torch.float64)


def test_its_map_and_its_system_are_those_of_the_empty_state() -> None:
    named = streams()
    record = Preconditioned(**named, spread=SPREAD)
    want, _ = loop(named)
    weights = record.attention_map()
    assert_close(torch.einsum("bhts,bshv->bthv", weights, named["v"]), want, "map @ v")
    assert_close(record.ltv().simulate(named["v"])[0], want, "o of the system")


def test_without_spread_it_is_the_delta_rule() -> None:
    named = streams()
    record = Preconditioned(**named, spread=1.0)
    plain = record.rule(torch.ones_like(named["k"]))
    assert_close(evaluate(record)[0], evaluate(plain)[0], "o")
    assert_close(plain.w, named["beta"] * named["k"], "w")


def test_what_has_no_form_is_refused() -> None:
    record = Preconditioned(**streams())
    with pytest.raises(NoFiniteFormError, match=r"HeadSharded\(group\)"):
        record.effect(Auto().evaluate)
    with pytest.raises(ShapeError, match=r"spread=0.0\): M lies between"):
        Preconditioned(**streams(), spread=0.0)
    with pytest.raises(TypeError, match="names no streams that carry the sign"):
        Signed(record, record.beta)
