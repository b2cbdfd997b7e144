from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastweights.errors import CheckpointError
from fastweights.training.loop.metrics import Metrics

ROW = '{"step": 1, "loss": 2.5, "lr": 0.1, "tokens_per_second": 9, "seconds": 0.5}'


def metrics(folder: Path, line: str | bytes) -> Metrics:
    path = folder / "metrics.jsonl"
    middle = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(ROW.encode() + b"\n" + middle + b"\n" + ROW.encode() + b"\n")
    return Metrics(path, step=1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (ROW.replace("step", "stEp"), "it has no step"),
        (ROW.replace("loss", "los3"), "it has no loss"),
        (ROW.replace("2.5", '"2.5"'), "loss is '2.5', and not a number"),
        (ROW.replace("1,", "null,", 1), "step is None, and not a number"),
        (ROW[:20], "Expecting value"),
        (b"\xff" + ROW.encode(), "can't decode byte"),
        ("", "Expecting value"),
    ],
)
def test_a_damaged_line_is_named_with_its_file(tmp_path, line, why):
    place = re.escape(f"{tmp_path / 'metrics.jsonl'}, line 2, is damaged: ")
    with pytest.raises(CheckpointError, match=f"{place}.*{why}.*; remove that line"):
        metrics(tmp_path, line)


def test_once_it_is_removed_the_curve_goes_on(tmp_path):
    assert len(metrics(tmp_path, ROW).rows) == 3
