"""Short convolutions of a converted layer's q and k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.layers import ShortConvolution, TokenContext, upcast
from fastweights.layers.context import TailEffect
from fastweights.linearize.convert.past import Past, ProjectedTokens
from fastweights.shapes import Mask, Segments


class QueryKeyConvolution(ShortConvolution):
    """Causal depthwise convolutions of q and k (LAWCAT, Liu et al., 2025, arXiv 2509.18467).

    q̃_t = Σ_j w_j ⊙ q_{t-j}, and k̃ likewise with taps of its own, j < size. Initially they change
    nothing.
    """

    name = "qk"
    parts = 1

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.weight[-1])

    def inputs_of(self, q: Tensor, k: Tensor) -> Tensor:
        """Join q and k ``[b t c]``, as the convolution reads them."""
        return torch.cat([q.flatten(2), k.flatten(2)], dim=-1)

    def empty(self, inputs: Tensor) -> Past:
        b, _, channels = inputs.shape
        return (inputs.new_zeros(b, self.size - 1, channels),)

    def after(self, past: Past, tokens: ProjectedTokens) -> Past:
        if tokens.keep is None and tokens.segments is None:
            last = tokens.inputs[:, max(tokens.inputs.shape[1] - self.size + 1, 0) :]
            return (torch.cat([*past, last], 1)[:, last.shape[1] :].clone(),)
        context = TokenContext(tokens.inputs, None, None, tokens.keep, tokens.segments)
        return (TailEffect.of(context, tokens.inputs, self.size - 1).after(*past),)


def convolve_queries_and_keys(
    convolution: QueryKeyConvolution,
    q: Tensor,
    k: Tensor,
    past: Past,
    keep: Mask | None,
    segments: Segments | None,
) -> tuple[Tensor, Tensor]:
    """Convolve queries ``[b t h k]`` and keys ``[b t g k]``, in float32 or wider.

    Args:
        convolution: The taps of all channels of both.
        q: The queries.
        k: The keys.
        past: The inputs of the tokens before these, ``[b size-1 c]``; nothing for zeros.
        keep: ``[b t]``, False for padding; None if there is none.
        segments: ``[b t]``, the number of each token's document; None if there is one.
    """
    x = upcast(convolution.inputs_of(q, k))
    tails = {convolution.name: past[0]} if past else None
    y = convolution(x, TokenContext(x, tails, None, keep, segments))
    queries, keys = y.split([q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]], dim=-1)
    return queries.unflatten(-1, q.shape[2:]), keys.unflatten(-1, k.shape[2:])
