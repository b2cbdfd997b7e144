"""Settings of the whole test run."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
"""The tests' tensors are so small that a second thread only waits."""
