"""The Python of the pages in docs/ runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastweights.mixers import MIXERS
from test_readme import BLOCK

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["new-mixer.md"])
def test_python_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks in order, in one namespace, as a reader would type them; what they register goes again."""
    for name, mixer in MIXERS.items():
        monkeypatch.setitem(MIXERS, name, mixer)
    monkeypatch.setitem(MIXERS, "tempered", MIXERS["linear"])
    monkeypatch.delitem(MIXERS, "tempered")
    examples = [found["text"] for found in BLOCK.finditer((DOCS / page).read_text()) if found["language"] == "python"]
    assert examples, f"{page} shows no Python"
    namespace: dict[str, object] = {"__name__": "page"}
    for example in examples:
        exec(compile(example, page, "exec"), namespace)
