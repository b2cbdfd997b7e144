"""Settings of the whole test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import config, install_import_hook

SHAPED = ("evaluate", "features", "kernels", "layers", "mixer", "mixers", "recurrence")
install_import_hook([f"fastweights.{part}" for part in SHAPED], "checker.check")

torch.set_num_threads(1)
"""The tests' tensors are so small that a second thread only waits."""


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the type checker: the library's own errors come through, and torch.compile traces the library alone."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers goes again."""
    from fastweights.mixers import MIXERS

    known = dict(MIXERS)
    yield
    for name in MIXERS.keys() - known.keys():
        del MIXERS[name]
