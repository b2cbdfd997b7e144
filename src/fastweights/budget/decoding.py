"""What one more token takes: the state of a sequence, and the least time that memory allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from fastweights.analysis.cost import cost, operations
from fastweights.budget.devices import Accelerator
from fastweights.budget.operations import (
    count_by_part,
    count_operations,
    kinds_of,
    mixers_of,
    sketch_model,
)
from fastweights.models import FastWeightsConfig
from fastweights.models.block import Block

HALF = 2
"""Bytes of a weight, and of a key or value in a cache, in bfloat16."""
SINGLE = 4
"""Bytes of a number of a recurrent state, in float32."""


@dataclass(frozen=True)
class Decoding:
    """Generation after `context` tokens, weights in bfloat16 and states in float32.

    Attributes:
        context: Tokens that were read before.
        weights: Bytes of the weights, which every token reads once for all sequences.
        state: Bytes of a sequence's states, and caches where layers have them.
        operations: Of one token.
        bandwidth: Bytes per second of the device.
        peak: Operations per second of the device.
    """

    context: int
    weights: int
    state: int
    operations: int
    bandwidth: float
    peak: float

    def floor(self, sequences: int) -> float:
        """Seconds that a token of each sequence takes at least: weights read, states read and
        written, products made."""
        moved = self.weights + 2 * sequences * self.state
        return max(moved / self.bandwidth, sequences * self.operations / self.peak)


def decoding(config: FastWeightsConfig, context: int, device: Accelerator) -> Decoding:
    """Compute what a token takes of `device` after `context` others.

    Raises:
        TypeError: If a rule does not state its operations.
    """
    done = count_operations(config, context)
    kinds = [list(_of_mixers(block, context)) for block in kinds_of(sketch_model(config))]
    mixers = [one for kind in islice(cycle(kinds), config.num_hidden_layers) for one in kind]
    state, step = (sum(numbers) for numbers in zip(*mixers, strict=True))
    products = done.projections + done.head + step
    weights = HALF * count_by_part(config).total
    return Decoding(context, weights, state, products, device.bandwidth, device.peak(True))


def _of_mixers(block: Block, context: int) -> Iterator[tuple[int, int]]:
    """Bytes of state of each of a block's mixers, and operations of a token."""
    for mixer in mixers_of(block):
        found = operations(mixer, context)
        width = HALF if found.rule == "Softmax" else SINGLE
        yield width * cost(mixer, context).state, found.step
