"""Kernels run by Triton's interpreter on the CPU.

Their process needs TRITON_INTERPRET=1 from its start (`make test-interpreted`), and then compiles
none; any other process leaves these tests alone.
"""

from __future__ import annotations

import pytest
import torch

from fastweights.kernels.triton.launch import INTERPRETED

if not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random streams whichever tests ran before."""
    torch.manual_seed(0)
