"""The batches of a run, in training order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import torch

from fastweights.lab.tasks import Batch, Protocol


def batches(protocol: Protocol, seed: int) -> Iterator[Batch]:
    """Yield the batch of every update: new ones without end, or epochs over the training set."""
    training = protocol.training
    if training.epochs is None:
        yield from (protocol.fresh(seed, step, training.batch) for step in count())
    parts = protocol.training_set(seed)
    for epoch in range(training.epochs or 0):
        yield from _epoch(
            parts,
            training.batch,
            np.random.default_rng([seed, epoch]) if training.shuffled else None,
        )


def _epoch(
    parts: Sequence[Batch], size: int, generator: np.random.Generator | None
) -> Iterator[Batch]:
    """One part after the other; with a generator, the examples of each in an order of this epoch's
    own.
    """
    for part in parts:
        order = np.arange(len(part)) if generator is None else generator.permutation(len(part))
        for rows in torch.from_numpy(order).split(size):
            yield part[rows]


def updates_per_epoch(protocol: Protocol) -> int:
    """Number of updates in an epoch; 1 where every batch is new."""
    if protocol.training.epochs is None:
        return 1
    return sum(-(-(segment.examples or 0) // protocol.training.batch) for segment in protocol.train)
