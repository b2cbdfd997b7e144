"""The order of sequences, also of more than memory should hold."""

from __future__ import annotations

import numpy as np
import pytest

from fastweights.training.data import windows
from fastweights.training.data.windows import Windows


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 1000, 4097])
def test_every_epoch_of_a_long_text_has_every_sequence_once(monkeypatch, count):
    monkeypatch.setattr(windows, "SHUFFLED", 0)
    text = Windows(np.arange(count + 1), 2, seed=0)
    assert text.epoch == count
    epochs = [text.starts(epoch * count, count) for epoch in range(3)]
    assert [sorted(starts) for starts in epochs] == [list(range(count))] * 3
    if count >= 64:
        assert len({tuple(starts) for starts in epochs}) == 3
        assert abs(np.corrcoef(epochs[0], range(count))[0, 1]) < 0.35


def test_the_order_of_a_very_long_text_takes_no_memory():
    class Long:
        def __len__(self) -> int:
            return 1 << 50

    starts = Windows(Long(), 1025, seed=1).starts(10**6, 1000)  # type: ignore[arg-type]
    assert len(set(starts)) == 1000
    assert 0.4 < np.mean(starts) / (1 << 50) < 0.6
    assert starts == Windows(Long(), 1025, seed=1).starts(10**6, 1000)  # type: ignore[arg-type]
