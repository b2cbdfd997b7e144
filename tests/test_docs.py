"""The literate pages run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_readme import BLOCK

DOCS = Path(__file__).parents[1] / "docs"
LITERATE = ["dsf-by-example.md", "new-mixer.md", "tasks.md"]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", LITERATE)
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = DOCS / page
    examples = [found["text"] for found in BLOCK.finditer(path.read_text()) if found["language"] == "python"]
    assert examples
    namespace: dict[str, object] = {"__name__": path.stem}
    for example in examples:
        exec(compile(example, str(path), "exec"), namespace)
