"""Other rules in place of softmax, computed from a pretrained layer's own q, k and v, alone or
beside a window of softmax.

q, k and v are those that the layer's attention gets, so that W_Q, W_K, W_V and W_O stay as they
are. Gates are linear in v, which unlike q and k is not rotated by its position, and are constant
initially; or they are pooled from k, as it is, and have no parameters. φ are the configuration's
feature maps. A state belongs to a query head.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.features import LearnedFeatures
from fastweights.layers import HeadNorm, l2_normalize, upcast
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import START, LinearBranch, WindowedBranch
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.head_windows import GroupedBranch
from fastweights.linearize.convert.landmark_branch import LandmarkBranch
from fastweights.linearize.convert.past import Past
from fastweights.recurrence import Decay, Delta, Mesa, Normalized, Recurrence, State, Windowed
from fastweights.recurrence.base import written_streams
from fastweights.recurrence.streams import at_most, disable_autocast
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.shapes import Mask

TAU = 16.0
"""Log decays are log σ(·) / τ (GLA)."""
OPEN = 4.0
"""The logit of a decay at the start: σ(4)^(1/16) forgets half in 600 tokens."""
HALF = 0.0
"""m of γ = σ(m) where both sides have a normaliser: γ = 1/2 (Liger)."""


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

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        del k
        return torch.einsum("btgv,gvn->btgn", upcast(v), upcast(self.W)) + upcast(self.b)


class PooledGate(nn.Module):
    """Computes logits ``[b t g n]`` of n gates per key head as averages of neighbouring channels of
    ``k [b t g k]``, without parameters (Liger)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def reset_parameters(self) -> None:
        """There are none."""

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        del v
        pooled = F.adaptive_avg_pool1d(upcast(k).flatten(0, 1), self.count)
        return pooled.unflatten(0, k.shape[:2])


class LogGate(LearnedFeatures):
    """Log-decays log σ(-x W) / τ and log σ(x W) / τ, the features of `MetaLABranch`.

    The tied keys 1 - α grow with x W and with -x W.
    """

    @staticmethod
    def activate(x: Tensor, /) -> Tensor:
        return F.logsigmoid(-x) / TAU


class RuleBranch(LinearBranch):
    """Base class of the branches below: the feature maps φ of q and of k, gates, and the window.

    Beside a window, the cache keeps its keys and values as they are, and those of the sinks; what
    the rule writes of them is made anew when they leave.
    """

    key_map: type[LearnedFeatures] | None = None
    """What k goes through, if not φ."""
    normalised: ClassVar[bool] = True
    """Whether the rule has a normaliser, which a window can share."""
    memories: ClassVar[int] = 1
    """Tensors in the rule's own state."""

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.key_repeats = attention.heads // attention.kv_heads
        key_map = config.phi if self.key_map is None else self.key_map
        self.columns = config.columns(attention)
        self.phi_q = config.phi(attention.heads, attention.head_dim, self.columns)
        self.phi_k = key_map(attention.kv_heads, attention.head_dim, self.columns)
        self.mix = nn.Parameter(torch.empty(attention.heads)) if config.has_window else None
        self._reset_mix()

    @abstractmethod
    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Recurrence:
        """Return the rule's record of these streams, token by token."""

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Recurrence:
        rule, config = self.rule(q, k, v), self.config
        if self.mix is None:
            return rule
        return Windowed(
            rule,
            self.softmax_queries(q),
            k,
            v,
            mix=upcast(self.mix).sigmoid().view(1, 1, -1, 1),
            window=config.window,
            shared=self.shares,
            sinks=config.sinks,
            softcap=self.attention.softcap,
        )

    @property
    def shares(self) -> bool:
        """Whether the window and the rule have one normaliser."""
        return self.config.shared and self.normalised

    @property
    def keeps_states(self) -> bool:
        return self.mix is None

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        parts = super().to_cache(state)
        if self.mix is None:
            return parts
        keys, values, *_, age = parts
        return keys, values, *parts[-1 - self.memories : -1], age

    def from_cache(self, kept: tuple[Tensor, ...], record: Any, past: Past) -> State:
        if self.mix is None:
            return super().from_cache(kept, record, past)
        keys, values, *memory, age = kept
        # no more of them can leave the window, and the oldest do
        first = at_most(keys.shape[2], self.config.sinks + record.shape[1])
        k, v = (s[:, :, :first].transpose(1, 2) for s in (keys, values))
        (b, *_, width), heads = k.shape, self.attention.heads
        with disable_autocast(k.device):
            # what the rule writes of them depends on no query
            rule = self.rule(k.new_zeros(b, 1, heads, width), k, v)
        room = (0, 0, 0, keys.shape[2] - first)
        written = (
            F.pad(s.expand(b, first, rule.shape[2], -1).transpose(1, 2), room)
            for s in written_streams(rule)
        )
        return keys, values, *written, *memory, age

    def cached_tokens(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Mask]:
        if self.mix is None:
            return super().cached_tokens(kept)
        keys, values, *_, age = kept
        return keys, values, age < FORGOTTEN

    def gate(self, count: int, start: float) -> Gate | PooledGate:
        """Return a new gate: `count` logits per key head, if learnt all `start` initially."""
        if self.config.gates == "pooled":
            return PooledGate(count)
        return Gate(self.attention.kv_heads, self.attention.value_dim, count, start)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_mix()

    def _reset_mix(self) -> None:
        if self.mix is not None:
            nn.init.constant_(self.mix, START if self.shares else HALF)

    def per_query(self, stream: Tensor) -> Tensor:
        """Repeat key heads for their query heads: ``[b t g ·]`` → ``[b t h ·]``."""
        return stream.repeat_interleave(self.key_repeats, dim=2) if self.key_repeats > 1 else stream


class UndecayedBranch(RuleBranch):
    """Linear attention φφᵀ with the parameters of `WindowedBranch`, for what that has no room
    for: sinks."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Normalized:
        k, v = map(self.per_query, (self.phi_k(k), v))
        return Normalized(Decay(self.phi_q(q), k, v, None))


class GLABranch(RuleBranch):
    """Gated linear attention on a layer's own streams.

    S_t = diag(α_t) S_{t-1} + φ(k_t)ᵀ v_t with α = σ(v W_α + b)^(1/τ), normalised by q_t z_t.
    """

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.alpha = self.gate(2 * self.columns, OPEN)

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Normalized:
        log_alpha = F.logsigmoid(self.alpha(k, v)) / TAU
        k, log_alpha, v = map(self.per_query, (self.phi_k(k), log_alpha, v))
        return Normalized(Decay(self.phi_q(q), k, v, log_alpha))


class MetaLABranch(RuleBranch):
    """MetaLA: as `GLABranch`, with the tied key 1 - α, and α = σ(∓ k W)^(1/τ) from the layer's own
    key."""

    key_map = LogGate

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Normalized:
        return Normalized(
            Decay(self.phi_q(q), None, self.per_query(v), self.per_query(self.phi_k(k)))
        )


class LightningBranch(RuleBranch):
    """Lightning attention: a constant decay e^(-2^(-8h/H)) of each head h of H, normalised by q_t
    z_t."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Normalized:
        k, v = map(self.per_query, (self.phi_k(k), v))
        heads = self.attention.heads
        exponent = -8 * torch.arange(1, heads + 1, device=q.device) / heads
        return Normalized(Decay(self.phi_q(q), k, v, -(2**exponent)[None, None, :, None]))


class GatedDeltaBranch(RuleBranch):
    """Gated DeltaNet on q and k of unit length, with α per head as in `GLABranch`, and β = σ(v W_β
    + b)."""

    normalised = False

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.alpha, self.beta = self.gate(self.decays, OPEN), self.gate(1, 0.0)

    @property
    def decays(self) -> int:
        """The number of decays of a key head."""
        return 1

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Delta | Mesa:
        key, log_alpha = l2_normalize(self.phi_k(k)), F.logsigmoid(self.alpha(k, v)) / TAU
        beta = self.beta(k, v).sigmoid()
        return Delta(l2_normalize(self.phi_q(q)), *map(self.per_query, (key, v, beta, log_alpha)))


class KDABranch(GatedDeltaBranch):
    """Kimi Delta Attention: `GatedDeltaBranch` with a decay per channel of φ."""

    @property
    def decays(self) -> int:
        return 2 * self.columns


class MesaBranch(GatedDeltaBranch):
    """MesaNet on the streams of `GatedDeltaBranch`, with a ridge Λ = softplus(λ) per head and
    channel, initially 1."""

    memories = 2

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.ridge = nn.Parameter(torch.empty(attention.heads, 2 * self.columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.ridge, math.log(math.expm1(1)))

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Mesa:
        delta = super().rule(q, k, v)
        return Mesa(
            delta.q, delta.k, delta.v, delta.beta, delta.log_decay, F.softplus(upcast(self.ridge))
        )


class SupraBranch(RuleBranch):
    """SUPRA (Mercat et al., 2024): a constant decay per head (RetNet's), and a norm per head
    instead of the normaliser."""

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        self.norm = HeadNorm(attention.value_dim, center=True, affine=True)

    def rule(self, q: Tensor, k: Tensor, v: Tensor) -> Decay:
        k, v = map(self.per_query, (self.phi_k(k), v))
        head = torch.arange(self.attention.heads, device=q.device)
        log_gamma = torch.log1p(-(2.0 ** -(5 + head)))
        return Decay(self.phi_q(q), k, v, log_gamma[None, None, :, None])

    def read(self, o: Tensor) -> Tensor:
        return self.norm(o)


RULES: Mapping[str, type[LinearBranch]] = {
    "windowed": WindowedBranch,
    "gla": GLABranch,
    "metala": MetaLABranch,
    "lightning": LightningBranch,
    "gated_deltanet": GatedDeltaBranch,
    "kda": KDABranch,
    "mesa": MesaBranch,
    "supra": SupraBranch,
}
"""What a layer can become, by the names that configurations use."""


def branch_of(config: LinearAttentionConfig, attention: AttentionLayer) -> LinearBranch:
    """Build the module, in float32, that replaces one softmax attention.

    Args:
        config: The linear attention.
        attention: Heads, widths and scaling of the attention that it replaces.
    """
    sizes = set(config.heads_of(attention))
    branch = RULES[config.rule]
    if config.features == "landmarks":
        branch = LandmarkBranch
    elif config.rule == "windowed" and config.sinks:
        branch = UndecayedBranch
    if len(sizes) > 1:
        return GroupedBranch(attention, config, branch).float()
    return branch(attention, config.of_head(*sizes.pop())).float()
