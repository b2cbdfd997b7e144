"""How often the slow suite tries properties on random values."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from laws import CALLS


def test_the_slow_suite_makes_ten_thousand_calls() -> None:
    for path in Path(__file__).parent.glob("test_random_*.py"):
        import_module(path.stem)
    assert sum(CALLS.values()) >= 10_000
