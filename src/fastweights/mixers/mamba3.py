"""Mamba-3 (Lahoti et al., 2026), of one input and output per head (SISO) or several (MIMO)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    PreviousToken,
    Ranks,
    TokenContext,
    head_width,
    init_steps,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Recurrence, Substeps
from fastweights.shapes import Embedded, Output
from fastweights.systems import as_complex_channels, heavy_tail, pairs


class Mamba3(Mixer):
    """
    f_q  (RMSNorm(x W_C) + b_C)*      f_α  e^(-Δ_t (a_t + jθ_t)),  Δ_t = softplus(x W_Δ + b_Δ)
    f_k  RMSNorm(x W_B) + b_B         f_g  SiLU(x W_z)
    f_v  x W_V                        d_v = expand·d,  d_k / H = N

    with S_t = α_t (S_{t-1} + (1 - λ_t) Δ_t k_{t-1}ᵀ v_{t-1}) + λ_t Δ_t k_tᵀ v_t, λ_t = σ(x W_λ),
    and o_t = Re(q_t S_t) + D v_t: pairs of channels are complex, and turned by θ_t = π tanh(x W_θ),
    the same for all heads. a_t = 1 + u, or 1 / (1 - u) for u = x W_a < 0, but at least 1e-4.
    Of rank R, kᵀv is Σ_i k_iᵀ v_i, i ≤ R, and each q_i reads an output o_i, see `Ranks`.

    Attributes:
        state, rank: N, and R, the inputs and outputs of a head
        groups: of heads that share q and k but for their biases
        partial_rotation: whether only the first half of the pairs turns
    """

    def __init__(
        self, d: int, heads: int = 4, state: Count = 64, expand: Count = 2, groups: Count = 1,
        partial_rotation: bool = True, rank: Count = 1, eps: Positive = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width, self.served = expand * d, head_width("heads", heads, groups)
        self.heads, self.rank, self.parts = heads, rank, rank * groups
        self.unrotated = (pairs(state) + 1) // 2 if partial_rotation else 0
        self.W_z, self.W_v = Linear(d, width, bias=False), Linear(d, width, bias=False)
        self.W_B, self.W_C = (Linear(d, self.parts * state, bias=False) for _ in range(2))
        self.W_a, self.W_lambda = (Linear(d, heads, bias=False) for _ in range(2))
        self.W_Delta, self.last_k, self.last_v = Linear(d, heads), PreviousToken(), PreviousToken()
        self.W_theta = Linear(d, pairs(state) - self.unrotated, bias=False)
        norms = (HeadNorm(state, center=False, affine=True, eps=eps) for _ in range(2))
        self.norm_B, self.norm_C = norms
        self.b_B, self.b_C = (nn.Parameter(torch.ones(rank * heads, state)) for _ in range(2))
        self.ranks = Ranks(rank, heads, head_width("expand · d", width, heads))
        self.D, self.W_o = nn.Parameter(torch.ones(heads)), Linear(width, d, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """softplus(b_Δ) log-uniform in [0.001, 0.1]; b_B, b_C and D are 1."""
        init_steps(self.W_Delta.bias)
        for one in (self.b_B, self.b_C, self.D):
            nn.init.ones_(one)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Substeps, Tensor]:
        z, v, k, q, *steps, theta = project_each(
            x, self.W_z, self.W_v, self.W_B, self.W_C, self.W_Delta, self.W_a, self.W_lambda,
            self.W_theta,
        )  # fmt: skip
        delta, u, share = (upcast(s)[..., None] for s in steps)
        delta, shares = F.softplus(delta), torch.stack([-share, share], 2).sigmoid()
        theta = torch.pi * F.pad(upcast(theta).tanh(), (0, self.unrotated))[:, :, None]
        rates = torch.complex(heavy_tail(u).clamp(min=1e-4), theta)
        k = self._pairs(self.last_k.both(k, past), self.norm_B, self.b_B)
        k = k * (shares * delta[:, :, None])[:, :, :, None]
        values = self.ranks.spread(split_heads(self.last_v.both(v, past), self.heads))
        q, gate = self._pairs(q, self.norm_C, self.b_C).conj(), torch.cat([z, v], dim=-1)
        return Substeps.two_point(q, k, values, -delta * rates), gate

    def _pairs(self, x: Tensor, norm: HeadNorm, bias: Tensor) -> Tensor:
        """Of every rank and head, ``[… R·groups·N]`` → ``[… R h N/2]``, complex."""
        x = norm(split_heads(x, self.parts)).repeat_interleave(self.served, -2) + bias
        return as_complex_channels(x).unflatten(-2, (self.rank, self.heads))

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        z, v = (split_heads(s, self.heads) for s in gate.chunk(2, dim=-1))
        o = o.real.to(v.dtype).unflatten(-1, (self.rank, -1)).transpose(2, 3)
        y = o + self.D[:, None] * self.ranks.spread(v)
        return self.W_o(self.ranks.gather(y, z).flatten(-2))
