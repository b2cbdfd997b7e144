"""H3: Hungry Hungry Hippos, Towards Language Modeling with State Space Models (Fu, Dao et al.,
2022), Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.layers import (
    Linear,
    ShortConvolution,
    TokenContext,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output
from fastweights.systems import DiagonalSystem, as_complex, linear_start, pairs, zero_order


class H3(Mixer):
    """
    f_q  C ⊗ x W_Q                         f_α  e^(ΔA)
    f_k  (e^(ΔA) - 1) / A ⊗ conv(x W_K)    f_g  1
    f_v  x W_V                             d_v = d,  d_k = N d

    with y = 2 Re(o) + D (q·k) v per head, then W_O: one diagonal system (S4D-Lin, zero-order hold)
    per head for all products of a key with a value. The shift system is the convolution it
    realises; its own skip is in the last tap.

    Attributes:
        heads: of one key and one value channel each in the paper's text; None for channels of 8
            each, as it trains
        state: N of the diagonal system
        shift: the states of the shift system
    """

    def __init__(
        self, d: int, heads: Count | None = None, state: Count = 64, shift: Count = 64
    ) -> None:
        super().__init__(d)
        self.heads = max(d // 8, 1) if heads is None else heads
        head_width("d", d, self.heads)
        self.W_q, self.W_k, self.W_v = (Linear(d, d) for _ in range(3))
        self.conv = ShortConvolution(d, shift)
        self.A = DiagonalSystem(
            (self.heads, pairs(state)), (self.heads, 1), linear_start, zero_order
        )
        self.C = nn.Parameter(torch.empty(self.heads, pairs(state), 2))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.W_o = Linear(d, d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """C of variance 1, half of it in each part; D is standard normal."""
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        q, k, v = project_each(x, self.W_q, self.W_k, self.W_v)
        q, k, v = (split_heads(s, self.heads) for s in (q, self.conv(k, past), v))
        log_alpha, B = self.A()
        skip = (q * k).sum(-1, keepdim=True) * self.D[:, None]
        q, k = _outer(2 * as_complex(self.C), q), _outer(B, k)
        return Decay(
            q, k, v, log_alpha.repeat_interleave(v.shape[-1], dim=-1)[None, None], skip
        ), None

    def read(self, o: Output, gate: Tensor | None, recurrence: Recurrence) -> Embedded:
        return self.W_o(o.real.flatten(-2).to(self.D.dtype))


def _outer(states: Tensor, x: Tensor) -> Tensor:
    """``[h n]`` and ``[b t h w]`` → ``[b t h n·w]``."""
    return (states[..., None] * x[..., None, :]).flatten(-2)
