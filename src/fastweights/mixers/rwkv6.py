"""Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (Peng et al., 2024), the
time mixing of Finch, RWKV-6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    PreviousToken,
    TokenContext,
    bounded_exp,
    head_width,
    project_pairs,
    split_heads,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Bonus, Recurrence
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded, Output


class RWKV6(Mixer):
    """
    f_q  mix(x) W_R        f_α  exp(-exp(tanh(mix(x) W¹_α) W²_α + b_α))
    f_k  mix(x) W_K        f_g  SiLU(mix(x) W_G)
    f_v  mix(x) W_V        d_k = expand_k·d,  d_v = d

    with mix(x)_t = x_t + (x_{t-1} - x_t) ⊙ (μ + tanh(z_t M¹) M²), a μ and M² each, z_t = x_t +
    (x_{t-1} - x_t) ⊙ μ_z; o_t = q_t (S_{t-1} + (u ⊙ k_t)ᵀ v_t), and LayerNorm per head with a
    weight and a bias of every channel. All starts as in the official code's first layer; how it
    goes on over the depth, a mixer does not know.

    Attributes:
        rank, decay_rank: the bottlenecks of tanh(z_t M¹) and of f_α
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_k: Positive = 1.0,
        rank: Count = 32,
        decay_rank: Count = 64,
        eps: Positive = 1e-5,
    ) -> None:
        super().__init__(d)
        keys, width = round(expand_k * d), head_width("d", d, heads)
        self.heads, key_width = heads, head_width("d_k", keys, heads)
        self.before = PreviousToken()
        self.mu_z, self.mu = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(5, d))
        self.M_1, self.M_2 = Linear(d, 5 * rank, bias=False), nn.Parameter(torch.empty(5, rank, d))
        self.W_r, self.W_k = Linear(d, keys, bias=False), Linear(d, keys, bias=False)
        self.W_v, self.W_g, self.W_o = (Linear(d, d, bias=False) for _ in range(3))
        self.W_alpha_1, self.W_alpha_2 = Linear(d, decay_rank, bias=False), Linear(decay_rank, keys)
        self.u = nn.Parameter(torch.empty(heads, key_width))
        self.norm = HeadNorm(width, center=True, affine=False, eps=eps)
        self.w_norm, self.b_norm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """With c = channel / d: μ = 1 - c, of r and g 1 - √c; b_α = -6 + 5 c^0.7; M¹ and W¹_α 0."""
        c, n = torch.arange(self.d) / self.d, torch.arange(self.u.numel())
        with torch.no_grad():
            nn.init.zeros_(self.mu_z).add_(1 - c)
            nn.init.zeros_(self.mu).add_(1 - torch.stack([c.sqrt(), c, c, c, c.sqrt()]))
            nn.init.zeros_(self.u).add_((((n + 1) % 3 - 1) / 10).view(self.u.shape))
            nn.init.zeros_(self.W_alpha_2.bias).add_(-6 + 5 * (n / len(n)) ** 0.7)
        for start in (self.M_1.weight, self.W_alpha_1.weight, self.b_norm):
            nn.init.zeros_(start)
        for start in (self.M_2, self.W_alpha_2.weight):
            nn.init.uniform_(start, -0.01, 0.01)
        nn.init.ones_(self.w_norm)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Bonus, Tensor]:
        layers = (self.W_r, self.W_alpha_1, self.W_k, self.W_v, self.W_g)
        q, a, k, v, gate = project_pairs(*zip(layers, self._mix(x, past), strict=True))
        log_alpha = -bounded_exp(self.W_alpha_2(a.tanh()))
        q, k, v, log_alpha = (split_heads(s, self.heads) for s in (q, k, v, log_alpha))
        return Bonus(q, k, v, log_alpha, (with_room(q) * self.u * k).sum(-1, keepdim=True)), F.silu(
            gate
        )

    def _mix(self, x: Tensor, past: TokenContext) -> tuple[Tensor, ...]:
        """x moved towards the token before it: for r, α, k, v and g."""
        change = self.before(x, past) - x
        z = self.M_1(x + change * self.mu_z).tanh().unflatten(-1, (5, -1))
        share = self.mu + torch.einsum("btnr,nrd->btnd", z, self.M_2)
        return torch.addcmul(x[:, :, None], change[:, :, None], share).unbind(2)

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        return self.W_o((self.norm(o).flatten(-2) * self.w_norm + self.b_norm) * gate)
