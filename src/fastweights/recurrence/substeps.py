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
from fastweights.recurrence.wrapper import Composed, Wrapper
from fastweights.shapes import Keys, LogDecay, Map, Mask, Output


@dataclass(frozen=True, eq=False)
class Substeps(Composed[Tensor], Wrapper[Tensor]):
    """Several steps of the inner rule per token, of which the last is read, or the last few.

    S_{t,i} = step of S_{t,i-1}, S_{t,0} = S_{t-1,n} ;  o_t = (o of the last steps, side by side)

    A product of n transitions is more than one of them can be: n keys are erased and written at a
    token, and eigenvalues may be complex. Source: Gated DeltaProduct (2502.10297); Mamba-3
    (2603.15569), whose tokens write that before them once more, and several keys at once.

    Attributes:
        inner: the record of all steps in their order, n for every token; its state is this
            record's
        count: n
        outputs: how many of a token's steps are read, the last ones; o is ``[b t h outputs·v]``
    """

    inner: MatrixRule[Tensor]
    count: int
    outputs: int = 1

    def __post_init__(self) -> None:
        _, steps, _ = self.inner.shape
        if not 1 <= self.outputs <= self.count:
            raise ShapeError(
                f"Substeps(count={self.count}, outputs={self.outputs}): a token reads by one of its"
                " steps or more, and by all of them at most"
            )
        if steps % self.count:
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
        steps = (None if s is None else s.flatten(1, 2) for s in (w, v, a, b))
        decays = None if log_decay is None else _pad_steps(log_decay[:, :, None], 0, count - 1)
        read = _pad_steps(q[:, :, None], count - 1, 0)
        return cls(DPLR(read, *steps, decays), count)  # type: ignore[arg-type]

    @classmethod
    def two_point(cls, q: Tensor, k: Tensor, v: Tensor, log_decay: LogDecay) -> Self:
        """`Decay` with two sets of r keys per token, S_t = diag(α_t) (S_{t-1} + Σ_i k_{t,1,i}ᵀ
        v_{t,1,i}) + Σ_i k_{t,2,i}ᵀ v_{t,2,i}: the first is written before the state decays, and r
        queries read what is there at last (Mamba-3's token before and its ranks, 2603.15569).

        Args:
            q: ``[b t r h k]``
            k: ``[b t 2 r h k]``
            v: ``[b t 2 r h v]``
            log_decay: ``[b t h 1|k]``
        """
        # 3r - 1 steps: r keys, r more after the decay, and r queries, the first at the last key
        ranks = q.shape[2]
        k, v = (_pad_steps(s.flatten(2, 3), 0, ranks - 1) for s in (k, v))
        q = _pad_steps(q, 2 * ranks - 1, 0)
        log_decay = _pad_steps(log_decay[:, :, None], ranks, 2 * ranks - 2)
        return cls(Decay(q, k, v, log_decay), 3 * ranks - 1, ranks)

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
    def values(self) -> int:
        return self.outputs * self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.inner.state_shapes

    def step(self, state: Tensor) -> tuple[Output, Tensor]:
        outputs = []
        for step in self.inner.split(1):
            o, state = step.step(state)
            outputs.append(o)
        return self.read_tokens((torch.cat(outputs, 1), state))

    def evaluate_with(self, evaluate: Evaluation, state: Tensor) -> tuple[Output, Any]:
        """(o, state) from the record of all steps."""
        return self.read_tokens(evaluate(self.inner, state))

    def read_tokens(self, evaluated: tuple[Tensor, Any]) -> tuple[Output, Any]:
        """The outputs of every token's last steps, and the state, from those of all steps."""
        o, state = evaluated
        return self._last_steps(o, 1).transpose(2, 3).flatten(3), state

    def _last_steps(self, x: Tensor, time: int) -> Tensor:
        """Those that are read, ``[… t outputs …]``, of steps ``[… n·t …]`` on the axis `time`."""
        tokens = x.unflatten(time, (-1, self.count))
        return tokens.narrow(time + 1, self.count - self.outputs, self.outputs)

    def attention_map(self) -> Map:
        """``[b h outputs·t n·t]``: a row for every step that is read, and a column for every step,
        as each writes a value of its own.
        """
        return self._last_steps(self.inner.attention_map(), 2).flatten(2, 3)

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


def _pad_steps(x: Tensor, before: int, behind: int) -> Tensor:
    """Steps ``[b t n h ·]`` with zeros around those of every token, in one row
    ``[b (before+n+behind)·t h ·]``.
    """
    return F.pad(x, (0, 0, 0, 0, before, behind)).flatten(1, 2)
