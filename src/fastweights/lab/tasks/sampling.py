"""Draws without replacement, many rows at once."""

from __future__ import annotations

import numpy as np

BLOCK = 1024


def sample_distinct(generator: np.random.Generator, rows: int, count: int, size: int) -> np.ndarray:
    """Draw ``[rows count]`` numbers from 0 to `size` - 1, distinct and uniform in every row.

    A number that repeats an earlier one of its row is drawn again. That rule looks at no number's
    value, so that all ordered choices are equally likely.

    Raises:
        ValueError: If `count` exceeds `size`.
    """
    _require_enough(count, size)
    chosen = generator.integers(size, size=(rows, count))
    left = np.arange(rows)
    while len(left):
        again = find_repeats(chosen[left])
        left, again = left[again.any(1)], again[again.any(1)]
        fresh = generator.integers(size, size=int(again.sum()))
        part = chosen[left]
        part[again] = fresh
        chosen[left] = part
    return chosen


def sample_by_weight(
    generator: np.random.Generator, rows: int, count: int, weights: np.ndarray
) -> np.ndarray:
    """Draw ``[rows count]`` indices of `weights` without replacement, in proportion to the weights.

    They are the first arrivals of exponential clocks with these rates (Gumbel's trick), which has
    the distribution of ``numpy.random.choice(len(weights), count, replace=False, p=weights)``,
    order included.
    """
    _require_enough(count, len(weights))
    scale = (1 / weights).astype(np.float32)
    blocks = [min(BLOCK, rows - first) for first in range(0, rows, BLOCK)]
    return np.concatenate(
        [_first(generator, block, count, scale) for block in blocks] or [np.empty((0, count), int)]
    )


def _first(generator: np.random.Generator, rows: int, count: int, scale: np.ndarray) -> np.ndarray:
    """The indices of the first arrivals, in order: the bits of a positive float sort as the float
    does.
    """
    arrivals = generator.standard_exponential((rows, len(scale)), dtype=np.float32) * scale
    return sort_with_columns(arrivals.view(np.uint32).astype(np.uint64))[1][:, :count]


def find_repeats(rows: np.ndarray) -> np.ndarray:
    """Mark, in a mask, every number that an earlier column of its row holds too."""
    numbers, columns = sort_with_columns(rows.astype(np.uint64))
    same = np.zeros(rows.shape, bool)
    np.put_along_axis(same, columns[:, 1:], numbers[:, 1:] == numbers[:, :-1], 1)
    return same


def sort_with_columns(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort every row of ``rows [n m]`` (uint64, below 2³²) and return (numbers, original columns).

    The sort is stable. Number and column are sorted as one integer, which is several times faster
    than an argsort.
    """
    packed = np.sort(rows << np.uint64(32) | np.arange(rows.shape[1], dtype=np.uint64), axis=1)
    return packed >> np.uint64(32), (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _require_enough(count: int, size: int) -> None:
    if not 0 < count <= size:
        raise ValueError(
            f"{count} distinct numbers are to be drawn out of {size}; take between 1 and {size}"
        )
