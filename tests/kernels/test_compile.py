"""torch.compile cannot trace the type checker of `conftest`, so its tests run in a process
without.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
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
