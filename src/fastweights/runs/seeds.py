"""Seeds that are a function of the step, so that a resumed run agrees with an uninterrupted one."""

from __future__ import annotations

import numpy as np


def random_seed_from(*numbers: int) -> int:
    """Combine several numbers into one seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
