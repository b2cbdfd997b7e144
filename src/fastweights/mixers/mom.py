"""MoM: Linear Sequence Modeling with Mixture-of-Memories (Du et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    RoutedContext,
    ShortConvolution,
    SiLUGate,
    SoftplusDecay,
    TokenContext,
    head_width,
    l2_normalize,
    project_each,
    upcast,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Delta, ShapeError
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded, Output


class MixtureOfMemories(Mixer):
    """
    f_q  g_m L2(SiLU(conv_m(x W_Q)))    f_α  exp(-a softplus(x W_α,m + b_α)), one per head
    f_k  L2(SiLU(conv_m(x W_K,m)))      f_β  σ(x W_β,m), one per head; 0 where g_m = 0
    f_v  SiLU(conv_m(x W_V,m))          f_g  SiLU(x W_G)
    d_k = expand_k·d,  d_v = expand_v·d in each memory m, RMSNorm per head, q scaled by d'_k^(-1/2)

    A router gives a token to the memories where softmax(x W_R) is largest; g_m are these numbers
    over their sum. One more memory is given all tokens, g = 1. A memory, its convolutions included,
    only sees the tokens that it is given; o = Σ_m q_m S_m.

    Attributes:
        memories, active: how many there are besides the shared one; and of them for a token
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        memories: Count = 4,
        active: Count = 2,
        expand_k: Positive = 0.5,
        expand_v: Positive = 1.0,
        conv: Count = 4,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        super().__init__(d)
        if active > memories:
            raise ShapeError(f"active = {active} of memories = {memories}; use at most as many")
        keys, values, every = round(expand_k * d), round(expand_v * d), memories + 1
        self.heads, self.every, self.active, self.floor = heads, every, active, floor
        self.scale, width = head_width("d_k", keys, heads) ** -0.5, head_width("d_v", values, heads)
        self.W_r, self.W_g = Linear(d, memories, bias=False), Linear(d, values, bias=False)
        self.W_q, self.W_k = Linear(d, keys, bias=False), Linear(d, every * keys, bias=False)
        self.W_v = Linear(d, every * values, bias=False)
        self.W_beta, self.W_alpha = (Linear(d, every * heads, bias=False) for _ in range(2))
        self.W_o, self.decay = Linear(values, d, bias=False), SoftplusDecay(heads)
        self.conv_q, self.conv_k = ShortConvolution(keys, conv), ShortConvolution(keys, conv)
        self.conv_v = ShortConvolution(values, conv)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)

    def shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(g, whether a memory is given the token) ``[b t m+1]``, those of the shared memory last.

        They are found among the logits, as a share may round to 0 and several to each other.
        """
        scores = upcast(logits).softmax(-1)
        chosen = upcast(logits).topk(self.active).indices
        best = scores.gather(-1, chosen)
        found = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        given = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)
        found = found.to(with_room(logits).dtype)
        return F.pad(found, (0, 1), value=1.0), F.pad(given, (0, 1), value=True)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Delta, SiLUGate]:
        layers = (self.W_k, self.W_v, self.W_beta, self.W_alpha)
        q, *streams, gate, logits = project_each(x, self.W_q, *layers, self.W_g, self.W_r)
        shares, given = self.shares(logits)
        read = RoutedContext(past, given)
        k, v, beta, alpha = (s.unflatten(-1, (self.every, -1)) for s in streams)
        inputs = ((self.conv_q, q[:, :, None].expand_as(k)), (self.conv_k, k), (self.conv_v, v))
        q, k, v = (read.convolve(*each).unflatten(-1, (self.heads, -1)) for each in inputs)
        q, k = l2_normalize(q, self.floor) * self.scale, l2_normalize(k, self.floor)
        q = (q * shares[..., None, None]).flatten(2, 3)
        beta = (with_room(beta).sigmoid() * given[..., None]).flatten(2, 3)[..., None]
        log_alpha = self.decay(alpha).masked_fill(~given[..., None, None], 0).flatten(2, 3)
        return Delta(q, k.flatten(2, 3), v.flatten(2, 3), beta, log_alpha), SiLUGate(gate)

    def read(self, o: Output, gate: SiLUGate, recurrence: Delta) -> Embedded:
        return super().read(o.unflatten(2, (self.every, -1)).sum(2), gate, recurrence)
