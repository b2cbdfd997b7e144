"""The table of faults: what was done, how it ended, and what was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from here import Said, outcome, run_here, train_words, write_text

ROWS: list[dict[str, object]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=Path, help="Write the table of faults to this JSON file")


@pytest.fixture
def told(request) -> Iterator[Callable[..., None]]:
    """Called with a fault, how the command ended, and what it said; a row of the table once the
    test has passed."""
    rows: list[dict[str, object]] = []

    def tell(fault: str, status: int, said: str) -> None:
        rows.append({"fault": fault, "test": request.node.nodeid, "status": status, "said": said})

    failed = request.session.testsfailed
    yield tell
    if request.session.testsfailed == failed:
        ROWS.extend(rows)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--faults", default=None)
    if path is not None:
        path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Undisturbed:
    """A run that nothing happened to.

    Attributes:
        text: Its text.
        out: Its folder.
        outcome: What it leaves, bit for bit.
    """

    def __init__(self, folder: Path) -> None:
        self.text, self.out = write_text(folder), folder / "undisturbed"
        assert run_here(train_words(self.text, self.out)).status == 0
        self.outcome = outcome(self.out)

    def run(self, out: Path, *more: str) -> Said:
        """The same command in another folder."""
        return run_here(train_words(self.text, out, *more))

    def equals(self, out: Path) -> bool:
        """Whether the run in `out` has come to the same end, bit for bit."""
        found = outcome(out)
        return all(found.get(name) == content for name, content in self.outcome.items())


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))
