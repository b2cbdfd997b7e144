"""Settings of the whole test run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

import pytest
import torch
from jaxtyping import config

from pictures import draw_all, draw_pixels

SHAPED = ("methods", "features", "layers", "mixer", "mixers", "recurrence")
PACKAGE = Path(__file__).parent.parent / "src" / "fastweights"
# Triton reads the source of its kernels, which must stay as it is
KERNELS = [m.name for m in iter_modules([str(PACKAGE / "kernels")]) if m.name != "triton"]
if TYPES_ARE_CHECKED := find_spec("beartype") is not None:
    import beartype_hook

    beartype_hook.install(
        [f"fastweights.{part}" for part in (*SHAPED, *(f"kernels.{name}" for name in KERNELS))]
    )
pytest_plugins = ["durations", "fast", "gpu_context", "order"]

draw_pixels()
torch.set_num_threads(1)
"""The tests' tensors are so small that a second thread only waits."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not TYPES_ARE_CHECKED:
        terminalreporter.write_line(
            "arguments were not checked against their annotations: beartype is not installed"
        )


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the type checker: the library's own errors come through, and torch.compile traces the
    library alone.
    """
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, for a test that looks at them; all others have pictures of a pixel."""
    draw_all(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers goes again, and so do modules of its own, as the next test's are called
    alike.
    """
    from fastweights.kernels import TABLE, register
    from fastweights.mixers import MIXERS

    known, kernels = dict(MIXERS), list(TABLE)
    yield
    if kernels != TABLE:
        TABLE.clear()
        for kernel in reversed(kernels):
            register(kernel)
    for name in MIXERS.keys() - known.keys():
        del MIXERS[name]
    if "mypkg" in sys.modules:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mypkg"]:
            del sys.modules[name]
