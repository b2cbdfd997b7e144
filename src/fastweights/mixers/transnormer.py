"""TransNormerLLM: A Faster and Better Large Language Model with Improved TransNormer (Qin et al.,
2023).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.features import FEATURES, cos_sin_features
from fastweights.layers import (
    Linear,
    TokenContext,
    WholeNorm,
    WideParameters,
    choose,
    head_numbers,
    head_width,
    project_each,
    require_fraction,
    split_heads,
    upcast,
)
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded

MAPS = {**FEATURES, "silu": F.silu}


class TransNormer(WideParameters, Mixer):
    """
    f_q  φ(x W_Q)        f_α  λ e^(jθ), λ = exp(-8 h/H (1 - depth)) of head h = 0 … H-1
    f_k  φ(x W_K)        f_g  x W_U
    f_v  x W_V           d_k = d_v = d

    with φ = SiLU (1 + ELU in the first TransNormer), RMSNorm of all heads together, without weight
    (SRMSNorm). θ is learnt (LRPE), 10000^(-2i/d'_k) at first; a head keeps the real part, as 2 d'_k
    channels (cos, sin).

    Attributes:
        feature_map: φ: silu, elu or relu
        depth: l / L, how far up the layer stands: upper layers forget less
    """

    wide = ("theta",)

    def __init__(
        self, d: int, heads: int = 4, feature_map: str = "silu", depth: float = 0.0
    ) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.depth, self.phi = (
            heads,
            require_fraction("depth", depth),
            choose("feature_map", feature_map, MAPS),
        )
        self.W_q, self.W_k, self.W_v, self.W_u, self.W_o = (
            Linear(d, d, bias=False) for _ in range(5)
        )
        self.theta = nn.Parameter(torch.empty(heads, width))
        self.norm = WholeNorm(d, center=False, affine=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        width = self.theta.shape[1]
        with torch.no_grad():
            nn.init.ones_(self.theta).mul_(
                1e4 ** (torch.arange(width, device=self.theta.device) * (-2 / width))
            )

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        *heads, gate = project_each(x, self.W_q, self.W_k, self.W_v, self.W_u)
        q, k, v = (split_heads(s, self.heads) for s in heads)
        angle = past.positions[..., None, None] * upcast(self.theta)
        log_lambda = head_numbers(self.heads, x) * (-8 / self.heads * (1 - self.depth))
        return Decay(
            cos_sin_features(self.phi(q), angle),
            cos_sin_features(self.phi(k), angle),
            v,
            log_lambda,
        ), gate
