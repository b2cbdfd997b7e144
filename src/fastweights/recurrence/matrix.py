"""What the rules have in common whose state is a matrix that keys and values are written into."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, Recurrence, S, add_resets, check_mask
from fastweights.recurrence.effects import DenseEffect, Effect
from fastweights.recurrence.scales import Scales
from fastweights.recurrence.streams import mask_stream
from fastweights.shapes import Keys, LogDecay, Mask, Output, Values


class MatrixRule(Recurrence[S]):
    """A rule that decays a matrix ``S [b h k v]`` per head and writes keys and values into it.

    A subclass is a frozen dataclass of streams, among them ``q``, ``v`` and ``log_decay``. It is
    linear in v, so that it can be normalised, take decays of either sign and, once it states
    `amplify`, exponential gates.

    Attributes:
        writes: the streams of which a token that is padding has zeros, besides its log decay
        carries_sign: the streams that the sign of a `Signed` record's decay goes onto
        reads_undecayed: whether what erases reads the state before it decays
    """

    q: Keys
    v: Values
    log_decay: LogDecay | None

    writes: ClassVar[tuple[str, ...]] = ("k",)
    carries_sign: ClassVar[tuple[str, ...]] = ("q", "v")

    @property
    def reads_undecayed(self) -> bool:
        return False

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        return ((b, h, self.q.shape[-1], self.v.shape[-1]),)

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    def add_skip(self, o: Tensor) -> Output:
        """The output from ``q_t S_t [b t h v]``: with the skip of a rule that has one."""
        return o.to(self.output)

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        found = {name: self.streams.get(name) for name in (*self.writes, "log_decay")}
        return replace(self, **{n: mask_stream(s, mask) for n, s in found.items() if s is not None})

    def restart(self, starts: Mask) -> Self:
        return replace(self, log_decay=add_resets(self, self.log_decay, starts))

    def effect(self, evaluate: Evaluation) -> Effect[Any]:
        """M and E of S ↦ M S + E, of a rule whose state is one matrix: from the state (0 ‖ I),
        with values of its own beside zeros.
        """
        first, *others = self.state_shapes
        if others:
            return super().effect(evaluate)
        *heads, k, v = first
        wide = self.with_values(torch.cat([self.v, self.v.new_zeros(*self.v.shape[:-1], k)], -1))
        identity = torch.eye(k, dtype=self.accumulator, device=self.device).expand(*heads, k, k)
        empty = torch.zeros(*heads, k, v, dtype=self.accumulator, device=self.device)
        _, after = evaluate(wide, torch.cat([empty, identity], -1))
        return DenseEffect(after[..., v:], after[..., :v])

    def with_values(self, v: Tensor) -> Self:
        """The same rule on other values, of any width: what `Normalized` sums the weights with."""
        return replace(self, v=v)

    def with_signs(self, signs: Tensor) -> Self:
        """The rule on the state σ_t S_t, for σ = ±1 ``[b t h 1]``: what `Signed` evaluates."""
        found = {name: self.streams.get(name) for name in self.carries_sign}
        return replace(self, **{n: signs * s for n, s in found.items() if s is not None})

    def amplify(self, scales: Scales, log_decay: Tensor) -> tuple[MatrixRule[S], Tensor]:
        """The rule with e^{w_t} k_t for k_t on a state divided by e^m: what `Amplified` evaluates.

        Args:
            scales: w, and m before and after every token
            log_decay: of the divided state, in place of this record's

        Returns:
            The rule, and the log ``[b t h 1]`` of what its outputs are divided by.
        """
        raise NotImplementedError(f"{type(self).__name__}.amplify")

    @classmethod
    def takes_gain(cls) -> bool:
        """Whether the rule states `amplify`."""
        return cls.amplify is not MatrixRule.amplify

    def surviving_state(self) -> Tensor | None:
        silent = self.with_values(torch.zeros_like(self.v))[-1:]
        ones = torch.ones(self.state_shapes[0], dtype=self.accumulator)
        after = silent.step(silent.adopt(ones))[1]
        return after if isinstance(after, Tensor) else after[0]

    def step_operations(self, context: int) -> int:
        """2 for reading, 2 for writing and 1 for decaying each number of the state."""
        del context
        h, k, v = self.operation_sizes
        return self._complex * h * k * v * (4 if self.log_decay is None else 5)

    def chunk_operations(self, context: int, size: int) -> int:
        """Scores and their sums over the chunk, and the state read and written."""
        del context
        h, k, v = self.operation_sizes
        return self._complex * h * (2 * size * (k + v) + 4 * k * v)

    @property
    def _complex(self) -> int:
        """Real operations in one of the record's own."""
        return 4 if self.accumulator.is_complex else 1
