"""Seeds that are a function of the step, so that a resumed run agrees with an uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def random_seed_from(*numbers: int) -> int:
    """Combine several numbers into one seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def seed_for(purpose: str, seed: int) -> int:
    """Return the seed of one purpose, such as "adapters", in a run whose seed is `seed`."""
    return random_seed_from(seed, int.from_bytes(purpose.encode()))


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Draw on the CPU as `seed` alone decides for the length of a block.

    PyTorch's generator then stands where it stood before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
