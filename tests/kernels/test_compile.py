"""torch.compile cannot trace the type checker of `conftest`, so its tests run in a process
without.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastweights.kernels.rehearsal import assume_constant_result


@pytest.mark.slow
def test_compiled_layers_agree() -> None:
    tests = Path(__file__).parents[1] / "mixers" / "compiled_layers.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "--show-capture=no",
        "--tb=line",
        str(tests),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_mark_of_constants_is_torchs() -> None:
    """It is set without torch.compiler's function, which takes a second to import."""
    ours, theirs = (lambda: 1), (lambda: 1)
    assume_constant_result(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}
