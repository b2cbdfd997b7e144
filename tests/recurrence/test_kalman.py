"""Chebyshev iteration beside exact solutions, and what a regression falls back to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import CASES, OPTIMAL, Shape
from checks import check, check_gradients
from fastweights.methods import Chunkwise, Recurrent, evaluate
from fastweights.recurrence import Chebyshev, Decay, Kalman, Mesa, Signed, solver_statistics
from tolerances import assert_close

KALMAN = next(case for case in CASES if case.name == "kalman")


def test_mesa_by_chebyshev_iteration_is_mesa() -> None:
    mesa = next(case for case in CASES if case.name == "mesa-scalar")
    solved = replace(mesa, rule=lambda **streams: Mesa(**streams, solver=Chebyshev(150)))
    streams, state = solved.streams(Shape(t=9)), solved.start(Shape(t=9))
    check(solved, streams, state, torch.float64, Recurrent(), Chunkwise(4))
    check_gradients(solved, streams, state, torch.float64, Chunkwise(4))


@pytest.mark.parametrize("steps", [5, 10, 20])
def test_the_error_is_within_the_bound(steps: int) -> None:
    g = torch.Generator().manual_seed(0)
    drawn = {name: draw(Shape(), g) for name, draw in OPTIMAL.items()}
    record = Mesa(**drawn, log_decay=None, solver=Chebyshev(steps))
    exact, found = replace(record, solver=Chebyshev(300)), record.optimal_queries()
    (operator, _), *_ = record.iterate_systems(size=len(record))
    largest = operator.squared_norm().sqrt() + operator.ridge.amax(-1, keepdim=True)
    quotient = (largest / operator.ridge.amin(-1, keepdim=True)).sqrt().max()
    bound = 2 * ((quotient - 1) / (quotient + 1)) ** steps * quotient
    error = (found - exact.optimal_queries()).norm() / exact.optimal_queries().norm()
    assert error <= bound
    assert (solver_statistics(record).steps == steps).all()


def test_without_the_regression_it_is_linear_attention() -> None:
    streams = {**KALMAN.streams(), "mix": torch.zeros(1, 1, 1, 1, dtype=torch.float64)}
    record = KALMAN.rule(**streams)
    assert isinstance(record, Kalman)
    plain = Decay(record.q, record.k, record.v, record.log_decay)
    assert_close(evaluate(record)[0], evaluate(plain)[0], "o")


def test_nothing_but_padding_reads_nothing() -> None:
    record = KALMAN.rule(**KALMAN.streams(Shape(t=5)))
    padded = record.keep(torch.zeros(2, 5, dtype=torch.bool))
    for method in (Recurrent(), Chunkwise(2)):
        assert (evaluate(padded, method=method)[0] == 0).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_regression_needs_a_ridge(ratio: float) -> None:
    with pytest.raises(ValueError, match="a regression needs a ridge; use one > 0"):
        replace(KALMAN.rule(**KALMAN.streams()), ratio=ratio)


@pytest.mark.usefixtures("unchecked")
def test_it_takes_no_signs() -> None:
    record = KALMAN.rule(**KALMAN.streams())
    assert isinstance(record, Kalman)
    with pytest.raises(TypeError, match="names no streams that carry the sign"):
        Signed(record, torch.ones(1, 1, 1, 1))


def test_negative_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="max_steps must not be negative"):
        Chebyshev(-1)
