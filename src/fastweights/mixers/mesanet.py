"""MesaNet's baselines (von Oswald et al., 2025), Table 3: one parametrisation, a rule each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    ShortConvolution,
    TokenContext,
    choose,
    head_width,
    l2_normalize,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Amplified, Decay, Delta, Normalized, Recurrence
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class Rule(NamedTuple):
    """The record of q, k (convolved), v and the logits of γ and β; which of the two gates there
    are.
    """

    record: Callable[[Any, Any, Any, Any, Any], Recurrence]
    forgets: bool = True
    writes: bool = True


def _gla(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, beta: Tensor) -> Decay:
    return Decay(_unit(q), _unit(k), (v * beta.sigmoid()).to(v.dtype), F.logsigmoid(gamma))


def _mlstm(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, beta: Tensor) -> Amplified:
    memory = Decay(q, k * k.shape[-1] ** -0.5, v, F.logsigmoid(gamma))
    return Amplified(Normalized(memory, floor=1.0), beta)


def _unit(x: Tensor) -> Tensor:
    return l2_normalize(F.silu(x))


RULES: Mapping[str, Rule] = {
    "mamba2": Rule(
        lambda q, k, v, gamma, _: Decay(_unit(q), _unit(k), v, F.logsigmoid(gamma)), writes=False
    ),
    "gla": Rule(_gla),
    "deltanet": Rule(
        lambda q, k, v, _, beta: Delta(_unit(q), _unit(k), v, beta.sigmoid()), forgets=False
    ),
    "gated_deltanet": Rule(
        lambda q, k, v, gamma, b: Delta(_unit(q), _unit(k), v, b.sigmoid(), F.logsigmoid(gamma))
    ),
    "mlstm": Rule(_mlstm),
}


class MesaNetBaseline(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  σ(x W_γ + b_γ), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β + b_β), one per head
    f_v  x W_V                        f_g  1
    d_k = d_v = d, RMSNorm per head

    Attributes:
        rule: gla; mamba2, without β; deltanet, without γ; gated_deltanet; or mlstm: f_q =
            conv(x W_Q), f_k = conv(x W_K) / √d'_k, f_β = e^(x W_β + b_β), the output divided by
            max(1, |q_t z_t|)
    """

    def __init__(self, d: int, heads: Count = 4, rule: str = "gla", conv: Count = 4) -> None:
        super().__init__(d)
        self.heads, self.rule, gates = heads, rule, choose("rule", rule, RULES)
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.W_gamma = Linear(d, heads) if gates.forgets else None
        self.W_beta = Linear(d, heads) if gates.writes else None
        self.conv_q, self.conv_k = ShortConvolution(d, conv), ShortConvolution(d, conv)
        self.norm = HeadNorm(head_width("d", d, heads), center=False, affine=True)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Recurrence, None]:
        q, k, v = project_each(x, self.W_q, self.W_k, self.W_v)
        q, k = self.conv_q(with_room(q), past), self.conv_k(with_room(k), past)
        q, k, v = (split_heads(s, self.heads) for s in (q, k, v))
        gates = (self.W_gamma, self.W_beta)
        gamma, beta = (None if W is None else upcast(W(x))[..., None] for W in gates)
        return RULES[self.rule].record(q, k, v, gamma, beta), None
