"""Softmax attention, whose state is the cache of all keys and values, or of the last few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import NoFiniteFormError, expand_time
from fastweights.recurrence.cached import Cache, CacheRule, SeenKeys, repeat_kv
from fastweights.recurrence.derivatives import redefine, transform_here
from fastweights.recurrence.streams import heads_first, mask_stream, require_width
from fastweights.shapes import GroupKeys, GroupValues, Keys, Map, Mask, Output, PerToken

SOFTMAX_OPERATIONS = 5
"""For one weight of a softmax: scale, maximum, exp, sum, division."""


@dataclass(frozen=True, eq=False)
class Softmax(CacheRule):
    """Softmax attention to all tokens so far, or to the last few.

    o_t = Σ_s softmax_s(q_t·k_s / √d_k) v_s over s ≤ t, or over the last `window` tokens only

    A decay makes of the scores q_t·k_s / √d_k + Σ_{j=s+1..t} log f_j (forgetting transformer,
    2503.02130 eq. 4). A sink of score a takes a weight of its own and has no value: the weights of
    the tokens are e^(s_ts) / (e^a + Σ_s e^(s_ts)).

    The state is a cache (see `CacheRule`) of all tokens, or of the last window - 1.

    Attributes:
        q: ``[b t h k]``
        k, v: ``[b t g k]``, ``[b t g v]`` with g | h: each key head serves h / g query heads (GQA)
        window: None, or how many tokens, itself included, a query sees
        log_decay: log f_t ≤ 0, ``[b t h 1]``, or None; −inf forgets all tokens before
        sinks: a, ``[b t h 1]``, such as a number per head ``[1 1 h 1]``; or None
        keep_mask, segment_starts: ``[b t 1 1]`` bool, set by `keep` and `segments`
    """

    of_queries: ClassVar[tuple[str, ...]] = ("q", "log_decay", "sinks")

    q: Keys
    k: GroupKeys
    v: GroupValues
    window: int | None = None
    log_decay: PerToken | None = None
    sinks: PerToken | None = None
    keep_mask: Tensor | None = None
    segment_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"Softmax(window={self.window}): a query sees at least itself; use window ≥ 1 or"
                " None"
            )
        require_width("log_decay", self.log_decay, 1)
        require_width("sinks", self.sinks, 1)
        self.check_groups()

    @property
    def span(self) -> int | None:
        return self.window

    @property
    def biased(self) -> bool:
        """Whether anything but queries and keys decides on the weights."""
        return self.log_decay is not None or self.sinks is not None

    @property
    def fading(self) -> PerToken | None:
        return self.log_decay

    def keep(self, mask: Mask) -> Self:
        kept = super().keep(mask)
        decay = None if self.log_decay is None else mask_stream(self.log_decay, mask)
        return replace(kept, log_decay=decay)

    def chunk(self, state: Cache) -> tuple[Output, Cache]:
        if self.biased:
            return self.step(state)
        seen = self.append_to_cache(state)
        q = heads_first(self.q, self.output).expand(-1, -1, self.shape[1], -1)
        past = seen.keys.shape[2] - self.shape[1]
        causal = (
            bool(past == 0)
            and self.window is None
            and self.keep_mask is None
            and self.segment_starts is None
        )
        mask = None if causal else self.visible(seen)[:, None]
        grouped = q.shape[1] != seen.keys.shape[1]
        o = attend(q, seen.keys, seen.values, mask, causal=causal, grouped=grouped)
        return o.transpose(1, 2), self.next_cache(seen)

    def ltv(self) -> NoReturn:
        raise NoFiniteFormError(
            "softmax attention has no linear form with a finite state (DSF Lemma 1); "
            "look at attention_map(), or at Normalized(Decay(φ(q), φ(k), v, None)) with features φ"
        )

    def normalisers(self) -> Tensor | None:
        """Σ_s e^{q_t·k_s / √d_k}, where every query sees all tokens before it and nothing else
        counts; None elsewhere.
        """
        masked = self.keep_mask is not None or self.segment_starts is not None
        if self.window is not None or masked or self.biased:
            return None
        keys = self.k.repeat_interleave(self.q.shape[2] // self.k.shape[2], 2)
        scores = torch.einsum("bthk,bshk->bhts", self.q, keys) / self.q.shape[-1] ** 0.5
        later = torch.ones_like(scores).triu(1).bool()
        return scores.masked_fill(later, -torch.inf).logsumexp(-1).exp().mT[..., None]

    def surviving_state(self) -> Tensor | None:
        return None if self.log_decay is None else self.log_decays()[:, :, -1:].exp()

    def step_operations(self, context: int) -> int:
        return self._operations(context + 1)

    def chunk_operations(self, context: int, size: int) -> int:
        """Of queries that see half the context on average."""
        del size
        return self._operations(context // 2)

    def _operations(self, tokens: int) -> int:
        """Of one query that sees so many tokens, or the window."""
        h, k, v = self.operation_sizes
        seen = tokens if self.window is None else min(tokens, self.window)
        return h * seen * (2 * k + 2 * v + SOFTMAX_OPERATIONS)

    def visible(self, seen: SeenKeys) -> Tensor:
        """As the rule has it; padding that sees nothing sees itself, as a softmax must."""
        t, s = self.shape[1], seen.keys.shape[2]
        visible = super().visible(seen)
        places = torch.arange(s, device=self.device)
        padding = places[s - t :, None] == places
        return visible | (padding & ~visible.any(-1, keepdim=True))

    def weigh_tokens(self, seen: SeenKeys) -> Map:
        q = heads_first(self.q, self.accumulator).expand(-1, -1, self.shape[1], -1)
        keys = repeat_kv(seen.keys.to(self.accumulator), self.shape[2])
        scores = q @ keys.mT / self.q.shape[-1] ** 0.5
        scores = scores if seen.decay is None else scores + seen.decay
        scores = scores.masked_fill(~self.visible(seen)[:, None], -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = expand_time(self, self.sinks).expand(*scores.shape[:3], 1)
        # the sink takes its share, and has no value
        return torch.cat([sinks, scores], -1).softmax(-1)[..., 1:]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False, grouped: bool
) -> Tensor:
    """Torch's attention of heads ``[b h t ·]``, whose fused kernels lack gradients of gradients and
    forward-mode ones: those are its formula's.
    """

    def define(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        formula = torch.ops.aten._scaled_dot_product_attention_math
        bias = None if mask is None else torch.where(mask, 0.0, -torch.inf).to(q.dtype)
        return formula(q, k, v, bias, 0.0, causal, enable_gqa=grouped)[0]

    if transform_here() is not None:
        return define(q, k, v)
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
    return redefine(define, o, q, k, v)[0]
