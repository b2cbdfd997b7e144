"""Preconditioned writes beside those of the delta rule, and what they have no form of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import CASES
from fastweights.methods import Auto, evaluate
from fastweights.recurrence import NoFiniteFormError, Preconditioned, ShapeError, Signed
from tolerances import assert_close


def record() -> Preconditioned:
    (case,) = (case for case in CASES if case.name == "preconditioned-scalar")
    found = case.rule(**case.streams())
    assert isinstance(found, Preconditioned)
    return found


def test_without_spread_it_is_the_delta_rule() -> None:
    plain = replace(record(), spread=1.0)
    delta = plain.rule(torch.ones_like(plain.k))
    assert_close(evaluate(plain)[0], evaluate(delta)[0], "o")
    assert_close(delta.w, plain.beta * plain.k, "w")


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(NoFiniteFormError, match=r"HeadSharded\(group\)"):
        record().effect(Auto().evaluate)
    with pytest.raises(ShapeError, match=r"spread=0.0\): M lies between"):
        replace(record(), spread=0.0)
    with pytest.raises(TypeError, match="names no streams that carry the sign"):
        Signed(record(), record().beta)
