"""Every script of examples/ runs, and says something."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


SLOW = ("own_rule.py", "convert.py")
"""Trainings of half a minute; rules of one's own and conversions have their tests."""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path.name, marks=pytest.mark.slow if path.name in SLOW else pytest.mark.long)
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_example_runs(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_all_are_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in listed for path in EXAMPLES.glob("*.py"))
