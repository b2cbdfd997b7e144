"""mLSTM: xLSTM, Extended Long Short-Term Memory (Beck et al., 2024), eq. 19-27; MesaNet Table 3."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    ShortConvolution,
    TokenContext,
    head_width,
    project_pairs,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import CountOrZero, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Amplified, Decay, Normalized
from fastweights.shapes import Embedded


class MLSTM(Mixer):
    """
    f_q  SiLU(conv(x)) W_Q + b_Q              f_α  σ(x W_f + b_f), one per head; or e^(x W_f + b_f)
    f_k  (SiLU(conv(x)) W_K + b_K) / √d'_k    f_i  e^(x W_i + b_i), one per head, multiplies kᵀv
    f_v  x W_V + b_V                          f_g  σ(x W_G + b_G)
    d_k = d_v = d, LayerNorm per head; the output is divided by max(|q_t z_t|, 1).

    The paper's eq. 26-27 stabilise the gates by m_t but leave the 1 as it is, which changes the
    layer; here, as in the released code, the 1 is rescaled too, so that m_t changes nothing.

    Attributes:
        conv: size of the short convolution; 1 is none, and no SiLU (xLSTM-7B)
        exponential_forget: the second f_α, which may exceed 1
        expand_k, bias: d_k / d, and whether W_Q, W_K, W_V and W_G have biases
        cap: bounds the gates' arguments: cap · tanh(· / cap) (xLSTM-7B); None for no bound
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        conv: CountOrZero = 4,
        exponential_forget: bool = False,
        expand_k: Positive = 1.0,
        bias: bool = True,
        cap: Positive | None = None,
        eps: NonNegative = 1e-5,
    ) -> None:
        super().__init__(d)
        keys = round(expand_k * d)
        self.heads, self.exponential_forget, self.cap = heads, exponential_forget, cap
        self.scale = head_width("d_k", keys, heads) ** -0.5
        self.conv = ShortConvolution(d, conv) if conv > 1 else None
        self.W_q, self.W_k = Linear(d, keys, bias=bias), Linear(d, keys, bias=bias)
        self.W_v, self.W_g = Linear(d, d, bias=bias), Linear(d, d, bias=bias)
        self.W_i, self.W_f = Linear(d, heads), Linear(d, heads)
        self.W_o = Linear(d, d, bias=False)
        self.norm = HeadNorm(head_width("d", d, heads), center=True, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gates start without weights; b_f from 3 in the first head to 6 in the last, b_i normal of
        std 0.1.
        """
        nn.init.zeros_(self.W_i.weight)
        nn.init.zeros_(self.W_f.weight)
        nn.init.normal_(self.W_i.bias, std=0.1)
        with torch.no_grad():
            nn.init.zeros_(self.W_f.bias).add_(torch.linspace(3, 6, self.heads))

    def project(self, x: Embedded, past: TokenContext) -> tuple[Amplified, Tensor]:
        mixed = x if self.conv is None else self.conv(x, past, silu=True)
        q, k, v, forget, log_i, gate = project_pairs(
            (self.W_q, mixed), (self.W_k, mixed), (self.W_v, x), (self.W_f, x), (self.W_i, x),
            (self.W_g, x),
        )  # fmt: skip
        q, k, v = (split_heads(s, self.heads) for s in (q, k * self.scale, v))
        forget, log_i = self._soft_cap(forget), self._soft_cap(log_i)
        log_alpha = forget if self.exponential_forget else F.logsigmoid(forget)
        memory = Decay(q, k, v, log_alpha)
        return Amplified(Normalized(memory, floor=1.0), log_i), gate.sigmoid()

    def _soft_cap(self, z: Tensor) -> Tensor:
        z = upcast(z)[..., None]
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)
