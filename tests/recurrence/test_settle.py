"""A settled state is the state: forgotten tokens in it change nothing."""

from __future__ import annotations

import pytest
import torch

from beside import beside_window
from cases import CASES, Case, Shape, State, parts
from fastweights.methods import evaluate
from fastweights.recurrence import NoFiniteFormError

SHAPE = Shape(t=17, h=4)
NAMED = {case.name: case for case in CASES}
SETTLING = [
    *(NAMED[name] for name in ("softmax-window", "softmax-window-1", "softmax-decay-window")),
    *(NAMED[name] for name in ("windowed-5", "windowed-0", "normalized-scalar")),
    *(beside_window("gla", *sizes) for sizes in ((5, 0), (5, 3), (0, 3))),
]


def _shapes(state: State) -> list[torch.Size]:
    return [part.shape for part in parts(state)]


@pytest.mark.parametrize("case", SETTLING, ids=str)
def test_what_follows_a_settled_state_is_what_follows_the_state(case: Case) -> None:
    record = case.rule(**case.streams(SHAPE))
    expected, _ = evaluate(record)
    shapes = _shapes(record.settle(record.initial_state()))
    for first in (0, 1, 3, 6, 12):
        state = record.initial_state() if first == 0 else evaluate(record[:first])[1]
        settled = record.settle(state)
        assert _shapes(settled) == shapes
        o, later = evaluate(record[first:], settled)
        torch.testing.assert_close(o, expected[:, first:], rtol=1e-9, atol=1e-9)
        assert _shapes(record.settle(later)) == shapes
        o, _ = evaluate(record[first : first + 1], settled)
        torch.testing.assert_close(o, expected[:, first : first + 1], rtol=1e-9, atol=1e-9)


def test_a_cache_that_grows_for_ever_does_not_settle() -> None:
    record = NAMED["softmax"].rule(**NAMED["softmax"].streams())
    with pytest.raises(NoFiniteFormError, match="give it a window"):
        record.settle(record.initial_state())
