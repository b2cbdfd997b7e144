"""64k tokens on several processes, beside one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from fastweights.parallel import TimeSharded
from processes import Report, run_together
from sliced_models import compare
from tiny import tiny, tokens

LENGTH = 1 << 16
NAMES = ("metala", "gated_deltanet", "mamba2", "rwkv4")


def compare_long(name: str) -> Report:
    ids = tokens(1, LENGTH)
    method = TimeSharded(distributed.group.WORLD)
    model = tiny(name, torch.float32).train()
    return {
        name: compare(model, method, {"input_ids": ids, "labels": ids}, distributed.group.WORLD)
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_long_sequences(name: str, processes: int, tmp_path: Path) -> None:
    """Of the loss's mean over all tokens; sums of so many float32 numbers differ in their order."""
    report = run_together(processes, partial(compare_long, name), tmp_path)
    assert report[name] <= 1e-4, report
