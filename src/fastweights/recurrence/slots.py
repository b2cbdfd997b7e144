"""A bounded memory of slots that softmax reads: two linear recurrences, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, add_resets, check_mask
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.effects import Effect, JointEffect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.softmax import SOFTMAX_OPERATIONS
from fastweights.recurrence.streams import heads_first, mask_stream, require_width
from fastweights.recurrence.wrapper import Composed
from fastweights.shapes import Keys, Map, Mask, Output, SlotDecay, SlotShares, Values

SlotState = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Slots(Composed[SlotState]):
    """Every token is written into slots, and softmax attention reads them.

    K̃_t = diag(α_t) K̃_{t-1} + s_tᵀ k_t ;  Ṽ_t = diag(α_t) Ṽ_{t-1} + s_tᵀ v_t ;  o_t = softmax(q_t
    K̃_tᵀ) Ṽ_t

    A KV cache of m entries, whatever the number of tokens. GSA (2409.07146 eq. 7-9) has s = 1 - α;
    ABC (2110.02488) s_t = e^(w_t) / z_t and α_t = z_{t-1} / z_t with z_t = Σ_{s≤t} e^(w_s). The
    state is (K̃ ``[b h m k]``, Ṽ ``[b h m v]``).

    Attributes:
        q, k: ``[b t h k]``; scores are not scaled
        v: ``[b t h v]``
        write: s, what each of m slots takes of a token, ``[b t h m]``
        log_decay: log α_t ≤ 0: None (no decay), ``[b t h 1]`` or ``[b t h m]``; −inf empties slots
    """

    q: Keys
    k: Keys
    v: Values
    write: SlotShares
    log_decay: SlotDecay | None = None

    def __post_init__(self) -> None:
        _ = self.shape
        require_width("k", self.k, self.q.shape[-1])
        require_width("log_decay", self.log_decay, 1, self.slots)

    @property
    def slots(self) -> int:
        """m"""
        return self.write.shape[-1]

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        return (b, h, self.slots, self.q.shape[-1]), (b, h, self.slots, self.values)

    def step(self, state: SlotState) -> tuple[Output, SlotState]:
        keys, values = state
        q, k, v, write = (heads_first(s, keys.dtype) for s in (self.q, self.k, self.v, self.write))
        if self.log_decay is not None:
            alpha = heads_first(self.log_decay, keys.dtype).exp().mT
            keys, values = alpha * keys, alpha * values
        keys, values = keys + write.mT * k, values + write.mT * v
        o = (q @ keys.mT).softmax(-1) @ values
        return o.transpose(1, 2).to(self.output), (keys, values)

    def evaluate_with(self, evaluate: Evaluation, state: SlotState) -> tuple[Output, SlotState]:
        """(o, state) from the recurrences of keys and of values."""
        weights, keys = self._match(evaluate, state[0])
        o, values = evaluate(self._recall(weights), state[1])
        return o.to(self.output), (keys, values)

    def _match(self, evaluate: Evaluation, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(softmax(q_t K̃_tᵀ) ``[b t h m]``, K̃ after the last token).

        Decays that differ between slots are those of heads, one for each slot, that have q and k
        in common and one value, s.
        """
        q, k, write = (s.to(self.accumulator) for s in (self.q, self.k, self.write))
        if self.log_decay is None or self.log_decay.shape[-1] == 1:
            scores, after = evaluate(Decay(q, k, write, self.log_decay), keys.mT)
            return scores.softmax(-1), after.mT
        b, t, h = self.shape
        q, k, write, decay = (
            heads_first(s, self.accumulator).expand(b, h, t, -1).flatten(0, 1)
            for s in (q, k, write, self.log_decay)
        )
        by_slot = Decay(q[:, :, None], k[:, :, None], write[..., None], decay[..., None])
        scores, after = evaluate(by_slot, keys.flatten(0, 1)[..., None])
        scores = scores.squeeze(-1).unflatten(0, (b, h)).transpose(1, 2)
        return scores.softmax(-1), after.view_as(keys)

    def _recall(self, weights: Tensor) -> Decay:
        """What reads Ṽ with the weights of the slots."""
        return Decay(weights, self.write, self.v, self.log_decay)

    def weights(self) -> Tensor:
        """softmax(q_t K̃_tᵀ) ``[b t h m]`` from the empty state."""
        keys = self.initial_state()[0]
        found = [self.write.new_zeros(*self.shape, self.slots, dtype=self.accumulator)[:, :0]]
        for piece in self.split():
            weights, keys = piece._match(lambda rule, before: rule.chunk(before), keys)
            found.append(weights)
        return torch.cat(found, 1)

    def attention_map(self) -> Map:
        return self._recall(self.weights()).attention_map()

    def ltv(self) -> LTV:
        """Ṽ read by the weights of this record, which depend on its keys, from the empty state."""
        return self._recall(self.weights()).ltv()

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        decay = None if self.log_decay is None else mask_stream(self.log_decay, mask)
        return replace(self, write=mask_stream(self.write, mask), log_decay=decay)

    def restart(self, starts: Mask) -> Self:
        return replace(self, log_decay=add_resets(self, self.log_decay, starts))

    def effect(self, evaluate: Evaluation) -> Effect[SlotState]:
        written = torch.cat([s.expand(*self.shape, -1) for s in (self.k, self.v)], -1)
        return JointEffect(replace(self._recall(self.write), v=written).effect(evaluate))

    def surviving_state(self) -> Tensor | None:
        return self._recall(self.write).surviving_state()

    def step_operations(self, context: int) -> int:
        """Both memories as `Decay`'s states, and the softmax over slots."""
        del context
        h, k, v = self.operation_sizes
        return h * self.slots * (5 * (k + v) + SOFTMAX_OPERATIONS)

    def chunk_operations(self, context: int, size: int) -> int:
        del context
        h, k, v = self.operation_sizes
        m = self.slots
        within = 2 * size * (k + 2 * m + v)
        return h * (within + 4 * m * (k + v) + m * SOFTMAX_OPERATIONS)
