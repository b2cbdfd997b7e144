"""TTT-Linear and TTT-MLP (Sun et al., 2024)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    CenteredNorm,
    Linear,
    Rope,
    ShortConvolution,
    TokenContext,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, CountOrZero, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import TTT
from fastweights.shapes import Embedded, Output


class TTTLinear(Mixer):
    """
    f_q  RoPE(conv(x W_QK) + b_q)    f_η  η_0 σ(x W_η + b_η) / d'_k, one per head
    f_k  RoPE(conv(x W_QK) + b_k)    f_g  GELU(x W_G)
    f_v  x W_V                       d_k = d_v = d

    with s_t = max(1 / i + c_i, 0) for token i of its minibatch, by which RoPE turns, too, and
    LayerNorm over all channels. The network that learns is linear.

    Attributes:
        minibatch: tokens that take their steps from the same weights
        rate: η_0
        conv: taps of the two convolutions; 0 for none of them, but W_K beside W_Q, as the paper's
            layer has it in Transformers
        gated: whether there is a gate, as in the paper's other layer
        eps: of the norms
    """

    def __init__(
        self, d: int, heads: int = 4, minibatch: Count = 16, rate: Positive = 1.0,
        conv: CountOrZero = 4, gated: bool = True, eps: Positive = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.rate, self.eps = heads, rate / width, eps
        self.rope = Rope(width)
        self.W_q, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(3))
        self.W_k = None if conv else Linear(d, d, bias=False)
        self.W_g = Linear(d, d, bias=False) if gated else None
        self.W_eta = Linear(d, heads)
        if conv:
            self.conv_q, self.conv_k = ShortConvolution(d, conv), ShortConvolution(d, conv)
            self.b_q, self.b_k = (nn.Parameter(torch.empty(d)) for _ in range(2))
        self.c = nn.Parameter(torch.empty(minibatch))
        self.gain, self.shift = (nn.Parameter(torch.empty(heads, width)) for _ in range(2))
        self.norm = CenteredNorm(d, eps=eps)
        self._learn(())

    def _learn(self, hidden: tuple[int, ...]) -> None:
        """Take a network with these hidden layers."""
        width, self.hidden = self.d // self.heads, hidden
        sizes = [(i + 1) * o for i, o in pairwise((width, *hidden, width))]
        self.W_0 = nn.Parameter(torch.empty(self.heads, sum(sizes)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W_0 normal with deviation 0.02, its biases 0; all else as if it were not there."""
        nn.init.normal_(self.W_0, std=0.02)
        width, end = self.d // self.heads, 0
        for i, o in pairwise((width, *self.hidden, width)):
            end += (i + 1) * o
            nn.init.zeros_(self.W_0[:, end - o : end])
        nn.init.ones_(self.gain)
        shifts = (self.b_q, self.b_k) if self.W_k is None else ()
        for zero in (self.shift, self.c, *shifts):
            nn.init.zeros_(zero)

    def project(self, x: Embedded, past: TokenContext) -> tuple[TTT, Tensor | None]:
        named = (self.W_q, self.W_v, self.W_eta, self.W_k, self.W_g)
        made = iter(project_each(x, *(layer for layer in named if layer is not None)))
        q, v, eta = next(made), next(made), next(made)
        k = q if self.W_k is None else next(made)
        gate = None if self.W_g is None else F.gelu(next(made), approximate="tanh")
        if self.W_k is None:
            q, k = self.conv_q(q, past, self.b_q), self.conv_k(k, past, self.b_k)
        q, k, v = (split_heads(s, self.heads) for s in (q, k, v))
        place = past.positions % len(self.c)
        q, k = self.rope.turn(place, q, k)
        c = upcast(self.c)
        numbers = torch.arange(1, len(c) + 1, device=c.device, dtype=c.dtype)
        scale = (1 / numbers + c).clamp(min=0)[place]
        rate = self.rate * upcast(eta).sigmoid()[..., None]
        start = (self.W_0, self.gain, self.shift)
        record = TTT(
            q, k, v, rate, scale[..., None, None], *start, self.hidden, len(self.c), self.eps
        )
        return record, gate

    def read(self, o: Output, gate: Tensor | None, recurrence: Any) -> Embedded:
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        y = self.norm(o.flatten(-2).to(weight.dtype))
        return self.W_o(y if gate is None else y * gate)


class TTTMLP(TTTLinear):
    """
    f_q  RoPE(conv(x W_QK) + b_q)    f_η  η_0 σ(x W_η + b_η) / d'_k, one per head
    f_k  RoPE(conv(x W_QK) + b_k)    f_g  GELU(x W_G)
    f_v  x W_V                       d_k = d_v = d

    as `TTTLinear`, but for the network that learns: it has a hidden layer with GELU.

    Attributes:
        expand: its width, in widths of a head
    """

    def __init__(
        self, d: int, heads: int = 4, minibatch: Count = 16, rate: Positive = 0.1,
        conv: CountOrZero = 4, gated: bool = True, eps: Positive = 1e-6, expand: Count = 4,
    ) -> None:  # fmt: skip
        super().__init__(d, heads, minibatch, rate, conv, gated, eps)
        self._learn((expand * (d // heads),))
