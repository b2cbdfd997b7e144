"""A run says by what means its numbers were computed, and warns where they have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastweights import kernels
from fastweights.training.language.numerics import RECORD, record_numerics


def test_a_run_records_its_numerics_once(tmp_path: Path) -> None:
    record_numerics(tmp_path)
    assert json.loads((tmp_path / RECORD).read_text()) == kernels.numerics()
    record_numerics(tmp_path)


def test_other_numerics_are_named(tmp_path: Path) -> None:
    before = {**kernels.numerics(), "float32_products": "another library"}
    (tmp_path / RECORD).write_text(json.dumps(before))
    now = kernels.numerics()["float32_products"]
    with pytest.warns(UserWarning, match=f"float32_products was another library, is {now}"):
        record_numerics(tmp_path)
    assert json.loads((tmp_path / RECORD).read_text()) == before
