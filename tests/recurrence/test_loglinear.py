"""Log-linear attention: levels by age, however many there are, and in batches of any lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from cases import OPTIMAL, Shape, by_levels, normal
from fastweights.methods import Chunkwise, Recurrent, evaluate
from fastweights.recurrence import Decay, LogLinear, Mesa, NoFiniteFormError, ShapeError
from oracles import loglinear
from tolerances import array, assert_close


def streams(t: int, levels: int) -> dict[str, Tensor]:
    g = Generator().manual_seed(0)
    drawn = {n: normal(2, t, 2, w, generator=g) for n, w in (("q", 3), ("k", 3), ("v", 2))}
    decay = normal(2, t, 2, 1, generator=g).sigmoid().log()
    return {**drawn, "log_decay": decay, "weights": normal(2, t, 2, levels, generator=g)}


@pytest.mark.parametrize(("t", "levels"), [(70, 9), (70, 5), (33, 2)])
def test_as_many_levels_as_there_are(t: int, levels: int) -> None:
    drawn = streams(t, levels)
    arrays: dict[str, Any] = {n: array(s) for n, s in drawn.items()}
    want, (final, count) = loglinear.loglinear(**arrays)
    for method in (Recurrent(), Chunkwise(16)):
        o, (states, after) = evaluate(by_levels(Decay)(**drawn), method=method)
        assert_close(o, want, f"o by {method}")
        assert_close(states, final, f"states by {method}")
        assert after.tolist() == count.tolist() == [t, t]


def test_equal_weights_are_the_inner_rule() -> None:
    drawn = streams(40, 8)
    del drawn["weights"]
    record = LogLinear(Decay(**drawn), torch.ones(1, 1, 1, 8, dtype=torch.float64))
    assert_close(evaluate(record)[0], evaluate(Decay(**drawn))[0], "o")


def test_sequences_of_different_lengths_go_on_together() -> None:
    drawn, rule = streams(20, 6), by_levels(Decay)
    early = [evaluate(rule(**{n: s[i : i + 1, :n_i] for n, s in drawn.items()}))[1]
             for i, n_i in enumerate((5, 11))]  # fmt: skip
    together = tuple(torch.cat(parts) for parts in zip(*early, strict=True))
    rest = [{n: s[i : i + 1, n_i : n_i + 9] for n, s in drawn.items()}
            for i, n_i in enumerate((5, 11))]  # fmt: skip
    batch = {n: torch.cat([one[n] for one in rest]) for n in drawn}
    o, _ = evaluate(rule(**batch), together, Chunkwise(4))
    for i, n_i in enumerate((5, 11)):
        whole = evaluate(rule(**{n: s[i : i + 1] for n, s in drawn.items()}))[0]
        assert_close(o[i : i + 1], whole[:, n_i : n_i + 9], f"o of sequence {i}")


def test_levels_that_merge_have_no_compact_system() -> None:
    with pytest.raises(NoFiniteFormError, match="merge from token to token"):
        by_levels(Decay)(**streams(4, 3)).ltv()


@pytest.mark.usefixtures("unchecked")
def test_records_that_do_not_fit() -> None:
    drawn = streams(4, 3)
    weights = drawn.pop("weights")
    with pytest.raises(ShapeError, match="LogLinear has 2 levels or more"):
        LogLinear(Decay(**drawn), weights[..., :1])
    with pytest.raises(
        ShapeError, match=r"\[batch, time, heads\] = \[2, 1, 2\], weights \[2, 4, 2"
    ):
        LogLinear(Decay(**{n: s[:, :1] for n, s in drawn.items()}), weights)
    g = Generator().manual_seed(0)
    optimal: dict[str, Any] = {n: draw(Shape(t=4), g) for n, draw in OPTIMAL.items()}
    mesa: Any = Mesa(**optimal, log_decay=None)
    with pytest.raises(TypeError, match="more than one matrix; use Decay, Delta or DPLR"):
        LogLinear(mesa, weights)
