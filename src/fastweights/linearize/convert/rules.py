"""Linear attention by other recurrences, computed from a pretrained layer's own q, k and v, with
learnt gates.

q, k and v are those that the layer's attention gets, so that W_Q, W_K, W_V and W_O stay as they
are. Gates are linear in v, which unlike q and k is not rotated by its position, and are constant
initially. φ are the configuration's feature maps. A state belongs to a query head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.features import LearnedFeatures
from fastweights.layers import HeadNorm, l2_normalize, upcast
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.recurrence import Decay, Delta, Mesa, Normalized

TAU = 16.0
"""Log decays are log σ(·) / τ (GLA)."""
OPEN = 4.0
"""The logit of a decay at the start: σ(4)^(1/16) forgets half in 600 tokens."""


class Gate(nn.Module):
    """Computes logits ``[b t g n]`` of n gates per key head from ``v [b t g v]``; initially all are
    `start`."""

    def __init__(self, heads: int, width: int, count: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.W = nn.Parameter(torch.empty(heads, width, count))
        self.b = nn.Parameter(torch.empty(heads, count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.W)
        nn.init.constant_(self.b, self.start)

    def forward(self, v: Tensor) -> Tensor:
        return torch.einsum("btgv,gvn->btgn", upcast(v), upcast(self.W)) + upcast(self.b)


class LogGate(LearnedFeatures):
    """Log-decays log σ(-x W) / τ and log σ(x W) / τ, the features of `MetaLABranch`.

    The tied keys 1 - α grow with x W and with -x W.
    """

    @staticmethod
    def activate(x: Tensor, /) -> Tensor:
        return F.logsigmoid(-x) / TAU


class RuleBranch(LinearBranch):
    """Base class of the branches below: the feature maps φ of q and of k, and gates."""

    key_map: type[LearnedFeatures] | None = None
    """What k goes through, if not φ."""

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.key_repeats = attention.heads // attention.kv_heads
        key_map = config.phi if self.key_map is None else self.key_map
        self.columns = config.columns(attention)
        self.phi_q = config.phi(attention.heads, attention.head_dim, self.columns)
        self.phi_k = key_map(attention.kv_heads, attention.head_dim, self.columns)

    def gate(self, count: int, start: float) -> Gate:
        """Return a new gate: `count` logits per key head, all of them `start` initially."""
        return Gate(self.attention.kv_heads, self.attention.value_dim, count, start)

    def reset_parameters(self) -> None:
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def per_query(self, stream: Tensor) -> Tensor:
        """Repeat key heads for their query heads: ``[b t g ·]`` → ``[b t h ·]``."""
        return stream.repeat_interleave(self.key_repeats, dim=2) if self.key_repeats > 1 else stream


class GLABranch(RuleBranch):
    """Gated linear attention on a layer's own streams.

    S_t = diag(α_t) S_{t-1} + φ(k_t)ᵀ v_t with α = σ(v W_α + b)^(1/τ), normalised by q_t z_t.
    """

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.alpha = self.gate(2 * self.columns, OPEN)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Normalized:
        k, log_alpha, v = map(self.per_query, (self.phi_k(k), F.logsigmoid(self.alpha(v)) / TAU, v))
        return Normalized(Decay(self.phi_q(q), k, v, log_alpha))


class MetaLABranch(RuleBranch):
    """MetaLA: as `GLABranch`, with the tied key 1 - α, and α = σ(∓ k W)^(1/τ) from the layer's own
    key."""

    key_map = LogGate

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Normalized:
        return Normalized(
            Decay(self.phi_q(q), None, self.per_query(v), self.per_query(self.phi_k(k)))
        )


class GatedDeltaBranch(RuleBranch):
    """Gated DeltaNet on q and k of unit length, with α per head as in `GLABranch`, and β = σ(v W_β
    + b)."""

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.alpha, self.beta = self.gate(1, OPEN), self.gate(1, 0.0)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Delta | Mesa:
        k, log_alpha, beta = (
            l2_normalize(self.phi_k(k)),
            F.logsigmoid(self.alpha(v)) / TAU,
            self.beta(v).sigmoid(),
        )
        return Delta(l2_normalize(self.phi_q(q)), *map(self.per_query, (k, v, beta, log_alpha)))


class MesaBranch(GatedDeltaBranch):
    """MesaNet on the streams of `GatedDeltaBranch`, with a ridge Λ = softplus(λ) per head and
    channel, initially 1."""

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.ridge = nn.Parameter(torch.empty(attention.heads, 2 * self.columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "ridge" in self._parameters:
            nn.init.constant_(self.ridge, math.log(math.expm1(1)))

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Mesa:
        delta = super().project(q, k, v)
        return Mesa(
            delta.q, delta.k, delta.v, delta.beta, delta.log_decay, F.softplus(upcast(self.ridge))
        )


class SupraBranch(RuleBranch):
    """SUPRA (Mercat et al., 2024): a constant decay per head (RetNet's), and a norm per head
    instead of the normaliser."""

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.norm = HeadNorm(attention.value_dim, center=True, affine=True)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Decay:
        k, v = map(self.per_query, (self.phi_k(k), v))
        head = torch.arange(self.attention.heads, device=q.device)
        log_gamma = torch.log1p(-(2.0 ** -(5 + head)))
        return Decay(self.phi_q(q), k, v, log_gamma[None, None, :, None])

    def read(self, o: Tensor) -> Tensor:
        return self.norm(o)
