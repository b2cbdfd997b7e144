"""Several steps of a rule per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import CHUNK, Evaluation, check_mask
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.dplr import DPLR
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.streams import ShapeError, lazy_property
from fastweights.recurrence.wrapper import Wrapper
from fastweights.shapes import Keys, LogDecay, Map, Mask, Output


@dataclass(frozen=True, eq=False)
class Substeps(Wrapper[Tensor]):
    """Several steps of the inner rule per token, of which the last is read.

    S_{t,i} = step of S_{t,i-1}, S_{t,0} = S_{t-1,n} ;  o_t = o of the n-th step

    A product of n transitions is more than one of them can be: n keys are erased and written at a
    token, and eigenvalues may be complex. Source: Gated DeltaProduct (2502.10297); Mamba-3
    (2603.15569), whose tokens write that before them once more.

    Attributes:
        inner: the record of all steps in their order, n for every token; its state is this
            record's
        count: n
    """

    inner: MatrixRule[Tensor]
    count: int

    def __post_init__(self) -> None:
        _, steps, _ = self.inner.shape
        if self.count < 1 or steps % self.count:
            raise ShapeError(
                f"Substeps(count={self.count}): the inner record has {steps} steps, which is no"
                f" multiple of {self.count}; give every token as many steps"
            )

    @classmethod
    def of(
        cls,
        q: Keys,
        w: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None = None,
        log_decay: LogDecay | None = None,
    ) -> Self:
        """`DPLR` n times per token: the state decays before the first step, and is read after the
        last.

        Args:
            q: ``[b t h k]``
            w, a, b: ``[b t n h k]``, as in `DPLR`
            v: ``[b t n h v]``
            log_decay: ``[b t h 1|k]``, or None
        """
        count = w.shape[2]
        behind, before = (0, 0, 0, 0, 0, count - 1), (0, 0, 0, 0, count - 1, 0)
        steps = (None if s is None else s.flatten(1, 2) for s in (w, v, a, b))
        decays = None if log_decay is None else F.pad(log_decay[:, :, None], behind).flatten(1, 2)
        read = F.pad(q[:, :, None], before).flatten(1, 2)
        return cls(DPLR(read, *steps, decays), count)  # type: ignore[arg-type]

    @classmethod
    def two_point(cls, q: Keys, k: Tensor, v: Tensor, log_decay: LogDecay) -> Self:
        """`Decay` with two keys per token, S_t = diag(α_t) (S_{t-1} + k_{t,1}ᵀ v_{t,1}) + k_{t,2}ᵀ
        v_{t,2}: the first is written before the state decays (Mamba-3's token before, 2603.15569).

        Args:
            q: ``[b t h k]``
            k: ``[b t 2 h k]``
            v: ``[b t 2 h v]``
            log_decay: ``[b t h 1|k]``
        """
        second = (F.pad(s[:, :, None], (0, 0, 0, 0, 1, 0)) for s in (q, log_decay))
        read, decays = (s.flatten(1, 2) for s in second)
        return cls(Decay(read, k.flatten(1, 2), v.flatten(1, 2), decays), 2)

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        b, steps, h = self.inner.shape
        return b, steps // self.count, h

    def __getitem__(self, span: slice) -> Self:
        start, stop, _ = span.indices(len(self))
        return self._of_steps(self.inner[self.count * start : self.count * stop])

    def split(self, size: int = CHUNK) -> Iterator[Self]:
        return map(self._of_steps, self.inner.split(self.count * size))

    def _of_steps(self, inner: MatrixRule[Tensor]) -> Self:
        return replace(self, inner=inner)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.inner.state_shapes

    def step(self, state: Tensor) -> tuple[Output, Tensor]:
        o = self.empty_output()
        for step in self.inner.split(1):
            o, state = step.step(state)
        return o, state

    def chunk(self, state: Tensor) -> tuple[Output, Tensor]:
        return self.read_tokens(self.inner.chunk(state))

    def read_tokens(self, evaluated: tuple[Tensor, Any]) -> tuple[Output, Any]:
        """The output of every token's last step, and the state, from those of all steps."""
        o, state = evaluated
        return o[:, self.count - 1 :: self.count], state

    def attention_map(self) -> Map:
        """``[b h t n·t]``: every step writes a value of its own."""
        return self.inner.attention_map()[:, :, self.count - 1 :: self.count]

    def ltv(self) -> LTV:
        """The system of the steps, n of them for every token."""
        return self.inner.ltv()

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return self._of_steps(self.inner.keep(mask.repeat_interleave(self.count, 1)))

    def restart(self, starts: Mask) -> Self:
        first = torch.arange(self.count, device=starts.device) == 0
        return self._of_steps(self.inner.restart((starts[..., None] & first).flatten(1)))

    def effect(self, evaluate: Evaluation) -> Effect[Tensor]:
        return self.inner.effect(evaluate)

    def surviving_state(self) -> Tensor | None:
        silent = self.inner[-self.count :].with_values(torch.zeros_like(self.inner.v[:, :1]))
        return silent.chunk(torch.ones(self.state_shapes[0], dtype=self.accumulator))[1]

    def step_operations(self, context: int) -> int:
        return self.count * self.inner.step_operations(self.count * context)

    def chunk_operations(self, context: int, size: int) -> int:
        return self.count * self.inner.chunk_operations(self.count * context, size)
