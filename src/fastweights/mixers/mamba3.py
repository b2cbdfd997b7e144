"""Mamba-3 (Lahoti et al., 2026), with one input and one output per head (SISO)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    PreviousToken,
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

SLOWEST = 1e-4  # the least rate of decay


class Mamba3(Mixer):
    """
    f_q  (RMSNorm(x W_C) + b_C)*      f_α  e^(-Δ_t (a_t + jθ_t)),  Δ_t = softplus(x W_Δ + b_Δ)
    f_k  RMSNorm(x W_B) + b_B         f_g  SiLU(x W_z)
    f_v  x W_V                        d_v = expand·d,  d_k / H = N

    with S_t = α_t (S_{t-1} + (1 - λ_t) Δ_t k_{t-1}ᵀ v_{t-1}) + λ_t Δ_t k_tᵀ v_t, λ_t = σ(x W_λ),
    and o_t = Re(q_t S_t) + D v_t: pairs of channels are complex, and turned by θ_t = π tanh(x W_θ),
    the same for all heads. a_t = 1 + u, or 1 / (1 - u) for u = x W_a < 0.

    Attributes:
        state: N
        groups: of heads that share q and k but for their biases
        still: False: all pairs turn; True: the second half of them does not
    """

    def __init__(
        self, d: int, heads: int = 4, state: Count = 64, expand: Count = 2, groups: Count = 1,
        still: bool = True, eps: Positive = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width, self.served = expand * d, head_width("heads", heads, groups)
        head_width("expand · d", width, heads)
        angles = pairs(state) // 2 if still else pairs(state)
        self.heads, self.groups, self.still = heads, groups, pairs(state) - angles
        self.W_z, self.W_v = Linear(d, width, bias=False), Linear(d, width, bias=False)
        self.W_B, self.W_C = (Linear(d, groups * state, bias=False) for _ in range(2))
        self.W_a, self.W_lambda = (Linear(d, heads, bias=False) for _ in range(2))
        self.W_Delta, self.W_theta = Linear(d, heads), Linear(d, angles, bias=False)
        self.norm_B = HeadNorm(state, center=False, affine=True, eps=eps)
        self.norm_C = HeadNorm(state, center=False, affine=True, eps=eps)
        self.b_B, self.b_C = (nn.Parameter(torch.ones(heads, state)) for _ in range(2))
        self.D, self.W_o = nn.Parameter(torch.ones(heads)), Linear(width, d, bias=False)
        self.last_k, self.last_v = PreviousToken(), PreviousToken()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """softplus(b_Δ) log-uniform in [0.001, 0.1]; b_B, b_C and D are 1."""
        init_steps(self.W_Delta.bias)
        for one in (self.b_B, self.b_C, self.D):
            nn.init.ones_(one)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Substeps, Tensor]:
        gate, v, k, q, *steps, theta = project_each(
            x, self.W_z, self.W_v, self.W_B, self.W_C, self.W_Delta, self.W_a, self.W_lambda,
            self.W_theta,
        )  # fmt: skip
        delta, u, share = (upcast(s)[..., None] for s in steps)
        delta, share = F.softplus(delta), share.sigmoid()
        theta = torch.pi * F.pad(upcast(theta).tanh(), (0, self.still))[:, :, None]
        rates = torch.broadcast_tensors(heavy_tail(u).clamp(min=SLOWEST), theta)
        q, k = self.norm_C(split_heads(q, self.groups)), self.norm_B(split_heads(k, self.groups))
        gate = torch.cat([F.silu(gate), v], dim=-1)
        k, v = self.last_k.both(k.flatten(-2), past), self.last_v.both(v, past)
        k = self._pairs(k.unflatten(-1, (self.groups, -1)), self.b_B) * delta[:, :, None]
        k, v = k * torch.stack([1 - share, share], 2), v.unflatten(-1, (self.heads, -1))
        q = self._pairs(q, self.b_C).conj()
        return Substeps.two_point(q, k, v, -delta * torch.complex(*rates)), gate

    def _pairs(self, x: Tensor, bias: Tensor) -> Tensor:
        """Of every head, ``[… groups N]`` → ``[… h N/2]``, complex."""
        return as_complex_channels(x.repeat_interleave(self.served, -2) + bias)

    def read(self, o: Output, gate: Tensor | None, recurrence: Recurrence) -> Embedded:
        assert gate is not None
        gate, v = gate.chunk(2, dim=-1)
        skip = self.D[:, None] * split_heads(v, self.heads)
        return self.W_o((o.real.to(v.dtype) + skip).flatten(-2) * gate)
