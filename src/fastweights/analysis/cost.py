"""The cost of a mixer: parameters, state, and floating-point operations per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.layers import TokenContext
from fastweights.mixer import Mixer
from fastweights.recurrence import Recurrence

PASSES = 3
"""A backward pass takes about twice the products of its forward pass."""


class Cost(NamedTuple):
    """The cost of one layer for one sequence.

    The products of projections and the operations of the memory are counted; activations, norms,
    convolutions and what is made of weights alone (Hyena's filter) are not.

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


class Operations(NamedTuple):
    """Floating-point operations of one layer per token, forward.

    Attributes:
        rule: The name of the recurrence that takes them.
        projections: Of the products of projections.
        chunk: Of the memory in a sequence of `context` tokens.
        step: Of the memory for one more token then.
    """

    rule: str
    projections: int
    chunk: int
    step: int


def cost(mixer: Mixer, context: int = 2048, size: int = 64) -> Cost:
    """Compute the cost of a mixer.

    Args:
        mixer: The mixer.
        context: Tokens in the context.
        size: In training, records are evaluated in chunks of this many tokens, or token by token if
            that takes fewer operations.
    """
    recurrence, past, _ = _project_token(mixer)
    found = operations(mixer, context, size)
    return Cost(
        parameters=sum(p.numel() for p in mixer.parameters()),
        state=recurrence.state_size(context) + sum(tail.numel() for tail in past.tails.values()),
        decode=found.projections + found.step,
        train=PASSES * (found.projections + found.chunk),
    )


def operations(mixer: Mixer, context: int = 2048, size: int = 64) -> Operations:
    """Count the operations of a mixer, which may be on the meta device; see `cost`."""
    recurrence, _, projections = _project_token(mixer)
    step = recurrence.step_operations(context)
    chunk = min(step, recurrence.chunk_operations(context, size))
    return Operations(type(recurrence.innermost).__name__, projections, chunk, step)


def _project_token(mixer: Mixer) -> tuple[Recurrence, TokenContext, int]:
    """The record of one token, what is kept of it, and the operations of its projections: those
    that a further token adds, as what is made of weights alone is made once.
    """
    _project(mixer, 1)  # what is kept of weights is there from now on
    recurrence, past, one = _project(mixer, 1)
    return recurrence, past, _project(mixer, 2)[2] - one


def _project(mixer: Mixer, tokens: int) -> tuple[Recurrence, TokenContext, int]:
    """The record of so many tokens, what is kept of them, and all operations of projections."""
    weight = next(mixer.parameters())
    x = torch.zeros(1, tokens, mixer.d, dtype=weight.dtype, device=weight.device)
    past = TokenContext.start(x)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        recurrence, gate = mixer.project(x, past)
        b, t, h = recurrence.shape
        o = x.new_zeros(b, t, h, recurrence.values, dtype=recurrence.output)
        mixer.read(o, gate, recurrence)
    return recurrence, past, counter.get_total_flops()
