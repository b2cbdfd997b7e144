"""A settled state is the state: forgotten tokens in it change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.methods import evaluate
from fastweights.recurrence import Decay, Normalized, Recurrence, Softmax, Windowed, WindowedLinear
from fastweights.recurrence.base import NoFiniteFormError

B, T, H, G, K = 2, 17, 4, 2, 3


def _stream(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _records() -> dict[str, Recurrence]:
    q, k, v = _stream(0, B, T, H, K), _stream(1, B, T, G, K), _stream(2, B, T, G, K)
    decay, mix = F.logsigmoid(_stream(3, B, T, H, 1)), _stream(4, B, T, H, 1).sigmoid()
    fq, fk, wide = q.exp(), _stream(5, B, T, H, K).exp(), _stream(6, B, T, H, K)
    rule = Normalized(Decay(fq, fk, wide, decay))
    return {
        "softmax": Softmax(q, k, v, window=5),
        "softmax of one": Softmax(q, k, v, window=1),
        "with a decay": Softmax(q, k, v, window=5, log_decay=decay),
        "lolcats": WindowedLinear(q, k, v, fq, k.exp(), mix, window=5),
        "no window": WindowedLinear(q, k, v, fq, k.exp(), mix, window=0),
        "windowed": Windowed(rule, q, k, v, mix, window=5),
        "with sinks": Windowed(rule, q, k, v, mix, window=5, sinks=3),
        "sinks alone": Windowed(rule, q, k, v, mix, window=0, sinks=3),
        "decay": rule,
    }


RECORDS = _records()


def _shapes(state: object) -> list[torch.Size]:
    return [part.shape for part in (state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize("name", RECORDS)
def test_what_follows_a_settled_state_is_what_follows_the_state(name: str) -> None:
    record = RECORDS[name]
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
    q, k, v = _stream(0, B, T, H, K), _stream(1, B, T, G, K), _stream(2, B, T, G, K)
    record = Softmax(q, k, v)
    with pytest.raises(NoFiniteFormError, match="give it a window"):
        record.settle(record.initial_state())
