"""`causal_conv1d_fn` and `causal_conv1d_update`, which 22 model families call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.transformers.documents import read_documents
from fastweights.engines.transformers.substitute import Call, Substitute
from fastweights.ops import convolve

PACKAGE = "causal_conv1d"
SILU = (None, "silu", "swish")


def convolve_row(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The convolution of ``[b d t]`` by taps ``[d n]``, from nothing before it."""
    if activation not in SILU:
        return NotImplemented
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    tail = x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2])
    documents = read_documents(x, kwargs, led=True)
    if documents is not None:
        documents = torch.cat([documents[:, :1].expand(-1, tail.shape[1]), documents], dim=1)
    y, _ = convolve(tail, x, weight.T, documents, bias, silu=activation is not None)
    return y.transpose(1, 2).to(hidden_states.dtype)


def convolve_next(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The same of the next tokens; `conv_state` ``[b d m]`` has the last m inputs, m ≥ n - 1, and
    is moved on.
    """
    taps = weight.shape[1]
    if activation not in SILU or conv_state.shape[2] < taps - 1:
        return NotImplemented
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    seen = conv_state.transpose(1, 2).to(weight.dtype)
    tail = seen[:, seen.shape[1] - (taps - 1) :]
    y, _ = convolve(tail, x, weight.T, None, bias, silu=activation is not None)
    both = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(both[..., both.shape[2] - conv_state.shape[2] :])
    return y.transpose(1, 2).to(hidden_states.dtype)


def _rows() -> Iterator[Call]:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    for tokens in (1, 9):
        x = torch.randn(2, 6, tokens)
        yield Call((x, weight, bias), {"activation": "silu"})
        yield Call((x, weight), {"bias": None, "activation": None})


def _next_tokens() -> Iterator[Call]:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    for tokens, kept in ((1, 4), (1, 3), (5, 4)):
        x, state = torch.randn(2, 6, tokens), torch.randn(2, 6, kept)
        yield Call((x, state, weight, bias), {"activation": "silu"})
        yield Call((x, state, weight, None, None))


CONVOLUTIONS = (
    Substitute("causal_conv1d_fn", convolve_row, _rows, PACKAGE),
    Substitute("causal_conv1d_update", convolve_next, _next_tokens, PACKAGE),
)
