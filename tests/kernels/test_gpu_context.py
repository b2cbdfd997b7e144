"""What surrounds the tests on a GPU, on a CUDA that is played: a test that spoils the context fails
alone, and waits are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from fastweights.lab.bench.gpu import host_waits
from fastweights.models.graph import WARM_UPS, capture_graph
from gpu_context import context_error

SUPPORT = Path(__file__).parents[1] / "support"
PLAYED = """
import sys, types

pytest_plugins = ["gpu_context"]
errors = []

def synchronize():
    if errors:
        raise RuntimeError(f"{errors[0]}\\nCompile with `TORCH_USE_CUDA_DSA`")

cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

def pytest_configure(config):
    sys.modules["gpu_context"].SECONDS = 2
    config.addinivalue_line("markers", "gpu: ")
"""
TESTS = """
import time
import conftest, pytest

pytestmark = pytest.mark.gpu

def test_before():
    pass

def test_spoils():
    conftest.errors.append("CUDA error: an illegal memory access was encountered")

def test_between():
    assert not conftest.errors

def test_hangs():
    time.sleep(60)

def test_fails():
    assert False, "an ordinary failure"

def test_after():
    assert not conftest.errors
"""

ONCE = "This mode is a prototype and does not yet detect all synchronizing operations"
WAITS = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:108.)"


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(PLAYED)
    (folder / "test_played.py").write_text(TESTS)
    (folder / "test_other.py").write_text("import a_package_that_is_not_there")
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-rA", "-p", "no:cacheprovider"]
    paths = [f"--override-ini=pythonpath={SUPPORT}", "--rootdir", str(folder), str(folder)]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [*words, *options, *paths]
    return subprocess.run(command, capture_output=True, text=True, env=plain).stdout


def outcomes(text: str) -> dict[str, list[str]]:
    """By test, in order of the summary."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        place, _, name = line.partition("test_played.py::")
        if name and (outcome := place.split()[0]) in ("PASSED", "FAILED", "ERROR"):
            found.setdefault(name.split()[0], []).append(outcome)
    return found


@pytest.mark.slow
def test_the_worker_is_replaced_and_the_rest_goes_on(tmp_path):
    text = run(tmp_path, "-p", "xdist", "-n", "1", "--dist", "worksteal")
    found = outcomes(text)
    assert {name for name, outcome in found.items() if outcome == ["PASSED"]} == {
        *("test_before", "test_between", "test_after")
    }, text
    assert set(found["test_spoils"]) == set(found["test_hangs"]) == {"FAILED"}, text
    assert found["test_fails"] == ["FAILED"], text
    assert "the CUDA context is lost: CUDA error: an illegal memory access" in text
    assert "test_played.py::test_hangs" in text.partition("crashed while running")[2]
    assert "a_package_that_is_not_there" not in text


def test_without_workers_the_run_ends_and_says_why(tmp_path):
    text = run(tmp_path)
    assert outcomes(text) == {"test_before": ["PASSED"], "test_spoils": ["FAILED"]}, text
    assert "with -n 1 the other tests go on" in text


def test_a_device_that_was_never_asked_is_well(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert context_error() == ""


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As CUDA is for who looks for waits; the entries are the modes that were set."""
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        if not modes:
            warnings.warn(ONCE, stacklevel=2)
        modes.append(mode)

    for name in ("synchronize", "Stream", "current_stream", "stream", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return modes


def test_waits_are_counted_and_what_torch_says_of_the_mode_is_not(warned):
    def waiting() -> None:
        for _ in range(2):
            warnings.warn(WAITS, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert host_waits(lambda: None, torch.device("cuda")) == 0
        assert host_waits(waiting, torch.device("cuda")) == 2
    assert warned == ["warn", "default"] * 2


def test_a_capture_says_nothing_of_the_mode(warned):
    runs: list[str] = []
    capture_graph(lambda: runs.append(warned[-1]))
    assert runs == ["error"] * WARM_UPS + ["default"]
    assert warned == ["error", "default"] * WARM_UPS
