"""Models whose graphs torch.compile makes call the kernels, as operators.

`test_models` runs this file in a process of its own, without the CPU's kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.kernels import TABLE
from tiny import tiny, tokens
from triton_checks import check_training, training

TABLE[:] = [kernel for kernel in TABLE if kernel.devices != ("cpu",)]


SLOW = ("mesanet", "gated_deltanet", "rglru", "lolcats")


@pytest.mark.parametrize(
    "name", ["metala", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_graph_without_breaks_has_the_numbers_of_eager_code(name: str) -> None:
    ids = tokens(1, 40)
    wanted = training(tiny(name, torch.float32), ids)
    model: Any = tiny(name, torch.float32)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    check_training(training(model, ids), wanted)
