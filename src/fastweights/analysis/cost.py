"""The cost of a mixer: parameters, state, and floating-point operations per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.layers import TokenContext
from fastweights.mixer import Mixer

PASSES = 3
"""A backward pass takes about twice the products of its forward pass."""


class Cost(NamedTuple):
    """The cost of one layer for one sequence.

    The products of projections and the operations of the memory are counted; activations, norms and
    convolutions are not.

    Attributes:
        parameters: Number of learnt numbers.
        state: Numbers remembered after `context` tokens; complex ones count twice.
        decode: Operations for one more token then.
        train: Operations per token, forward and backward, of a sequence of `context` tokens.
    """

    parameters: int
    state: int
    decode: int
    train: int


def cost(mixer: Mixer, context: int = 2048, size: int = 64) -> Cost:
    """Compute the cost of a mixer.

    Args:
        mixer: The mixer.
        context: Tokens in the context.
        size: In training, records are evaluated in chunks of this many tokens, or token by token if
            that takes fewer operations.
    """
    x = torch.zeros(1, 1, mixer.d, dtype=next(mixer.parameters()).dtype)
    past = TokenContext.start(x)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        recurrence, gate = mixer.project(x, past)
        b, t, h = recurrence.shape
        mixer.read(
            torch.zeros(b, t, h, recurrence.values, dtype=recurrence.output), gate, recurrence
        )
    projections, decode = counter.get_total_flops(), recurrence.step_operations(context)
    return Cost(
        parameters=sum(p.numel() for p in mixer.parameters()),
        state=recurrence.state_size(context) + sum(tail.numel() for tail in past.tails.values()),
        decode=projections + decode,
        train=PASSES * (projections + min(decode, recurrence.chunk_operations(context, size))),
    )
