"""A run says by what means its numbers were computed, and warns where they have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastweights import kernels
from fastweights.train.numerics import RECORD, record_numerics


def test_a_run_records_its_numerics_once(tmp_path: Path) -> None:
    record_numerics(tmp_path)
    assert json.loads((tmp_path / RECORD).read_text()) == kernels.numerics()
    record_numerics(tmp_path)


def test_other_numerics_are_named(tmp_path: Path) -> None:
    with kernels.products("torch"):
        record_numerics(tmp_path)
    with (
        kernels.products("onednn"),
        pytest.warns(UserWarning, match="float32_products was torch, is onednn"),
    ):
        record_numerics(tmp_path)
    assert json.loads((tmp_path / RECORD).read_text())["float32_products"] == "torch"
