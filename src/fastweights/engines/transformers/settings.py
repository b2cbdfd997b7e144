"""torch as a fresh process has it, whatever the process around has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fresh_settings() -> Iterator[None]:
    """CPU tensors of float32, no autocast, no gradients, and random numbers that are always the
    same and leave those of the process alone.

    Modelling files are imported wherever a model is first made: under autocast, on the meta device,
    with bfloat16 as the default.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)
