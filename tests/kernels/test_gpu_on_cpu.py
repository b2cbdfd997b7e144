"""The tests on a GPU, with the CPU in its place and without beartype, which a GPU's machine may not
have: they are right but for what only CUDA does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONLY_ON_CUDA = ("host", "graphs", "decoding")
WITHOUT_BEARTYPE = """
import sys
sys.modules["beartype"] = None
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def passed(*options: str, without: tuple[str, ...] = ONLY_ON_CUDA) -> int:
    """How many tests passed."""
    words = [sys.executable, "-c", WITHOUT_BEARTYPE, "-m", "gpu", "-p", "cpu_as_gpu", *options]
    words += ["-p", "no:durations", "-k", " and ".join(f"not {name}" for name in without)]
    tests = str(Path(__file__).with_name("test_gpu.py"))
    found = subprocess.run([*words, tests], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-1000:]
    assert "beartype is not installed" in found.stdout
    return int(found.stdout.split(" passed")[0].split()[-1])


@pytest.mark.long
def test_the_first_case_of_each() -> None:
    """But for a training, which other tests resume on the CPU."""
    assert passed("--fast", without=(*ONLY_ON_CUDA, "resumes")) >= 10


@pytest.mark.slow
def test_all_cases() -> None:
    assert passed() > 500
