"""The baselines of MesaNet (von Oswald et al., 2025), Table 3: one parametrisation, and a rule each."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import HeadNorm, Past, ShortConvolution, head_width, heads, precise
from fastweights.mixer import Mixer
from fastweights.recurrence import Amplified, Decay, Delta, Normalized
from fastweights.shapes import Embedded


class _TableThree(Mixer):
    """What the baselines share with the Mesa layer: the same projections, two convolutions, RMSNorm per head."""

    forgets: ClassVar[bool] = True
    writes: ClassVar[bool] = True

    def __init__(self, d: int, heads: int = 4, conv: int = 4) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.scale = heads, width**-0.5
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.W_gamma = nn.Linear(d, heads) if self.forgets else None
        self.W_beta = nn.Linear(d, heads) if self.writes else None
        self.conv_q, self.conv_k = ShortConvolution(d, conv), ShortConvolution(d, conv)
        self.norm = HeadNorm(width, center=False, affine=True)

    def convolved(self, x: Embedded, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.conv_q(self.W_q(x), past), self.conv_k(self.W_k(x), past)
        return heads(q, self.heads), heads(k, self.heads), heads(self.W_v(x), self.heads)

    def streams(self, x: Embedded, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.convolved(x, past)
        return F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1), v

    def log_gamma(self, x: Embedded) -> Tensor | None:
        return None if self.W_gamma is None else F.logsigmoid(precise(self.W_gamma(x)))[..., None]

    def beta(self, x: Embedded) -> Tensor:
        assert self.W_beta is not None
        return self.W_beta(x).sigmoid()[..., None]


class MesaNetMamba2(_TableThree):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  σ(x W_γ + b_γ), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_g  1
    f_v  x W_V                        d_k = d_v = d, RMSNorm per head
    """

    writes = False

    def project(self, x: Embedded, past: Past) -> tuple[Decay, None]:
        return Decay(*self.streams(x, past), self.log_gamma(x)), None


class MesaNetGLA(_TableThree):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  σ(x W_γ + b_γ), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β + b_β), one per head
    f_v  β x W_V                      f_g  1
    d_k = d_v = d, RMSNorm per head
    """

    def project(self, x: Embedded, past: Past) -> tuple[Decay, None]:
        q, k, v = self.streams(x, past)
        return Decay(q, k, v * self.beta(x), self.log_gamma(x)), None


class MesaNetDeltaNet(_TableThree):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_β  σ(x W_β + b_β), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_g  1
    f_v  x W_V                        d_k = d_v = d, RMSNorm per head
    """

    forgets = False

    def project(self, x: Embedded, past: Past) -> tuple[Delta, None]:
        return Delta(*self.streams(x, past), self.beta(x), self.log_gamma(x)), None


class MesaNetGatedDeltaNet(MesaNetDeltaNet):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  σ(x W_γ + b_γ), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β + b_β), one per head
    f_v  x W_V                        f_g  1
    d_k = d_v = d, RMSNorm per head
    """

    forgets = True


class MesaNetMLSTM(_TableThree):
    """
    f_q  conv(x W_Q)                  f_γ  σ(x W_γ + b_γ), one per head
    f_k  conv(x W_K) / √d'_k          f_β  e^(x W_β + b_β), one per head, multiplies kᵀv
    f_v  x W_V                        f_g  1
    d_k = d_v = d, RMSNorm per head; the output is divided by max(|q_t z_t|, 1).
    """

    def project(self, x: Embedded, past: Past) -> tuple[Amplified, None]:
        assert self.W_beta is not None
        q, k, v = self.convolved(x, past)
        memory = Normalized(Decay(q, k * self.scale, v, self.log_gamma(x)), floor=1.0)
        return Amplified(memory, precise(self.W_beta(x))[..., None]), None
