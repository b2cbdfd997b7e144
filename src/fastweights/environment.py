"""What a program runs with: optional packages, the commit, the processor."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def require_package(package: str, feature: str, alternative: str) -> None:
    """Check that an optional package is installed, before anything that needs it begins.

    Args:
        package: Its name, for ``import`` and for ``pip install``.
        feature: What needs it; the subject of the message.
        alternative: What to do without it; ends the message.

    Raises:
        ValueError: If the package is missing.
    """
    if find_spec(package) is None:
        raise ValueError(f"{feature} needs {package}: pip install {package}, {alternative}")


@cache
def commit() -> str | None:
    """Return the commit of this file, with ``+`` if the checkout differs from it otherwise than in
    results of benchmarks; None outside of a checkout. It is asked once, since a process goes on
    with the code that it has begun with."""
    code = (":(top)", ":(top,exclude)benchmarks/results")
    try:
        head = _git("rev-parse", "HEAD")
        return head + "+" if _git("status", "--porcelain", "--untracked-files=no", *code) else head
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def cpu_name() -> str:
    """Return what the processor calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
