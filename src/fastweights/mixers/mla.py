"""Multi-head latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fastweights.layers import HeadNorm, Linear, Rope, TokenContext, project_each, split_heads
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Softmax
from fastweights.shapes import Embedded, Output


class MLA(Mixer):
    """
    f_q  [x W_Q W_UKᵀ, RoPE(x W_QR)]   o_t  Σ_s softmax_s(q_t·k_s / √(d'_k + d'_r)) v_s W_UV
    f_k  [c, RoPE(x W_KR)]             f_g  1
    f_v  c                             d_k = rank + d'_r,  d_v = rank

    with c = RMSNorm(x W_C), one key and value for all heads: the state is the latent of every
    token, of which W_UK and W_UV make the heads' own, here on the queries' side of the products.

    Attributes:
        rank: channels of c; None for d / 2
        query_rank: W_Q and W_QR are of RMSNorm(x W_CQ), of so many channels; None for of x
        width: d'_k, a head's channels without; None for d / heads
        rope_dim: d'_r, a head's channels with rotary positions, whose key all heads share
        value_width: a head's channels of x W_UV; None for d'_k
        gated: f_g = σ(x W_g), one per head (Ling 3.0)
        rope: fields of `Rope`; {"fraction": 0} for none that turn (Kimi Linear)
    """

    def __init__(
        self,
        d: int,
        heads: Count = 4,
        rank: Count | None = None,
        query_rank: Count | None = None,
        width: Count | None = None,
        rope_dim: Count = 8,
        value_width: Count | None = None,
        gated: bool = False,
        rope: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(d)
        width = -(-d // heads) if width is None else width
        rank, values = rank or -(-d // 2), value_width or width
        self.heads, self.parts = heads, [width, rope_dim]
        self.rope = Rope(rope_dim, **(rope or {}))
        self.W_cq = None if query_rank is None else Linear(d, query_rank, bias=False)
        self.norm_q = None if query_rank is None else self._norm(query_rank)
        self.W_q = Linear(query_rank or d, heads * (width + rope_dim), bias=False)
        self.W_c, self.W_kr = Linear(d, rank, bias=False), Linear(d, rope_dim, bias=False)
        self.norm_c, self.norm = self._norm(rank), nn.Identity()
        self.W_uk = nn.Parameter(torch.empty(heads, width, rank))
        self.W_uv = nn.Parameter(torch.empty(heads, values, rank))
        self.W_g = Linear(d, heads, bias=False) if gated else None
        self.W_o = Linear(heads * values, d, bias=False)
        # Softmax divides by √(rank + rope_dim)
        self.scale = ((rank + rope_dim) / (width + rope_dim)) ** 0.5
        self.reset_parameters()

    @staticmethod
    def _norm(width: int) -> HeadNorm:
        return HeadNorm(width, center=False, affine=True, eps=1e-6)

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / fan-in."""
        for weight in (self.W_uk, self.W_uv):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Softmax, Tensor | None]:
        c, turning = project_each(x, self.W_c, self.W_kr)
        read = x if self.W_cq is None else self.norm_q(self.W_cq(x))  # type: ignore[misc]
        q, turning_q = split_heads(self.W_q(read), self.heads).split(self.parts, -1)
        q = torch.einsum("bthw,hwr->bthr", q, self.W_uk)
        turning_q, turning = self.rope.turn(past.positions, turning_q, turning[:, :, None])
        c = self.norm_c(c)[:, :, None]
        rule = Softmax(torch.cat([q, turning_q], -1) * self.scale, torch.cat([c, turning], -1), c)
        return rule, None if self.W_g is None else self.W_g(x).sigmoid()

    def read(self, o: Output, gate: Tensor | None, recurrence: Softmax) -> Embedded:
        y = torch.einsum("bthr,hvr->bthv", o, self.W_uv)
        return self.W_o((y if gate is None else y * gate[..., None]).flatten(-2))
