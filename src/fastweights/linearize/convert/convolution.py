"""Short convolutions of a converted layer's q and k, and the inputs that the next tokens need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastweights.layers import ShortConvolution, TokenContext, upcast
from fastweights.layers.context import TailEffect
from fastweights.recurrence import Recurrence
from fastweights.shapes import Mask, Segments


class QueryKeyConvolution(ShortConvolution):
    """Causal depthwise convolutions of q and k (LAWCAT, Liu et al., 2025, arXiv 2509.18467).

    q̃_t = Σ_j w_j ⊙ q_{t-j}, and k̃ likewise with taps of its own, j < size. Initially they change
    nothing.
    """

    name = "qk"

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.weight[-1])


@dataclass(frozen=True, eq=False)
class Convolved:
    """A record of convolved streams, and what was convolved.

    Attributes:
        record: The recurrence of the convolved streams.
        inputs: q and k of its tokens as they were, ``[b t c]``.
        keep: ``[b t]``, False for padding; None if there is none.
        segments: ``[b t]``, the number of each token's document; None if there is one.
    """

    record: Recurrence
    inputs: Tensor
    keep: Mask | None
    segments: Segments | None

    def __len__(self) -> int:
        return self.inputs.shape[1]

    def __getitem__(self, part: slice) -> Convolved:
        keep, segments = (x if x is None else x[:, part] for x in (self.keep, self.segments))
        return Convolved(self.record[part], self.inputs[:, part], keep, segments)

    def tail_after(self, tail: Tensor) -> Tensor:
        """Return the inputs ``[b n c]`` that the next tokens need, by those before these tokens."""
        past = TokenContext(self.inputs, None, None, self.keep, self.segments)
        return TailEffect.of(past, self.inputs, tail.shape[1]).after(tail)


def convolve_queries_and_keys(
    convolution: QueryKeyConvolution,
    q: Tensor,
    k: Tensor,
    tail: Tensor | None,
    keep: Mask | None,
    segments: Segments | None,
) -> tuple[Tensor, Tensor]:
    """Convolve queries ``[b t h k]`` and keys ``[b t g k]``, in float32 or wider.

    Args:
        convolution: The taps of all channels of both.
        q: The queries.
        k: The keys.
        tail: The inputs of the tokens before these, ``[b size-1 c]``; None for zeros.
        keep: ``[b t]``, False for padding; None if there is none.
        segments: ``[b t]``, the number of each token's document; None if there is one.
    """
    x = upcast(inputs_of(q, k))
    tails = None if tail is None else {convolution.name: tail}
    y = convolution(x, TokenContext(x, tails, None, keep, segments))
    queries, keys = y.split([q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]], dim=-1)
    return queries.unflatten(-1, q.shape[2:]), keys.unflatten(-1, k.shape[2:])


def inputs_of(q: Tensor, k: Tensor) -> Tensor:
    """Join q and k ``[b t c]``, as the convolution reads them."""
    return torch.cat([q.flatten(2), k.flatten(2)], dim=-1)
