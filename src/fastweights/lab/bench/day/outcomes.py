"""A plugin of pytest that hands every test's outcome on as soon as it is known.

It imports little, as each of the tests' workers loads it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

if find_spec("beartype") is None:
    # tests/conftest.py asks it to check types, which no test needs
    sys.modules["beartype_hook"] = cast(ModuleType, SimpleNamespace(install=lambda packages: None))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=int, help="descriptor that takes a line of JSON per test")
    parser.addoption("--leave-out", type=Path, help="JSON file of the tests and cases to leave out")
    parser.addoption("--place", default="cuda", help="the device in a GPU's place")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are done, and those of a case that is."""
    path = config.getoption("--leave-out")
    if path is None:
        return
    left_out = json.loads(path.read_text())
    done, cases = set(left_out["tests"]), tuple(f"[{case}" for case in left_out["cases"])
    kept = [
        i
        for i in items
        if i.nodeid not in done and not any(f"{c}{end}" in i.nodeid for c in cases for end in "-]")
    ]
    gone = [item for item in items if item not in kept]
    config.hook.pytest_deselected(items=gone)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Another device in the place of the GPU that `cuda` stands for."""
    place = request.config.getoption("--place")
    if fixturedef.argname != "cuda" or place == "cuda":
        return None
    import torch

    fixturedef.cached_result = (torch.device(place), fixturedef.cache_key(request), None)
    return torch.device(place)


class _Outcomes:
    """Writes outcomes where the workers' reports come together."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            note = str(report.longreprtext).strip() if report.failed else ""
            line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            text = json.dumps({**line, "note": _shorten(note)}) + "\n"
            os.write(self.descriptor, text.encode())


def _shorten(text: str) -> str:
    """The lines that pytest marks as the error's, or the last one."""
    lines = text.splitlines() or [""]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return " ".join(marked or lines[-1:])[:600]


def pytest_configure(config: pytest.Config) -> None:
    descriptor = config.getoption("--outcomes")
    if descriptor is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(descriptor))
