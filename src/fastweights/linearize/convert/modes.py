"""What a linearized layer returns: linear attention, softmax attention, or a combination of
both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.linearize.convert.branch import LinearBranch
from fastweights.recurrence import Recurrence, Windowed, WindowedLinear
from fastweights.recurrence.mapped import features
from fastweights.shapes import Mask, Output, Segments


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a linearized layer's attention, with both of its possible outputs.

    Attributes:
        layer: The layer's number.
        branch: The layer's linear branch.
        q: Queries ``[b t h k]``, after norms and rotary positions.
        k: Keys ``[b t g k]`` of g key heads, g | h.
        v: Values ``[b t g v]``.
        keep: ``[b t]``, False for padding; None if there is none.
        segments: ``[b t]``, the number of each token's packed document; None if there is one.
        kept: The call's ``attention_mask [b s+t]``, the tokens before it in the cache included, or
            None.
        record: Makes the branch's recurrence on these streams, with padding and packed documents
            applied.
        linear: Computes the branch's output ``[b t h v]``, and advances the cache if there is one.
            An optional function replaces the branch's recurrence by another one.
        softmax: Computes the output ``[b t h v]`` of the model's own attention, in its own dtype.
            Optional values ``[b t g ·]`` take the place of `v`.
    """

    layer: int
    branch: LinearBranch
    q: Tensor
    k: Tensor
    v: Tensor
    keep: Mask | None
    segments: Segments | None
    kept: Tensor | None
    record: Callable[[], Recurrence]
    linear: Callable[..., Output]
    softmax: Callable[..., Output]


class Mode(ABC):
    """What the converted layers of a model compute when they are called; set by `use_mode`.

    A mode of your own overrides `attend`, and may return anything that it computes from the call.
    """

    constant: ClassVar[bool] = True
    """True: the cache holds the state of constant size. False: all keys and values, which softmax
    needs.
    """

    @abstractmethod
    def attend(self, call: AttentionCall) -> Output:
        """Return the layer's output ``[b t h v]`` for `call`."""


class Student(Mode):
    """Linear attention: the default of a linearized model."""

    def attend(self, call: AttentionCall) -> Output:
        return call.linear()


class Teacher(Mode):
    """The original softmax attention, computed without a second copy of the model's weights."""

    constant = False

    def attend(self, call: AttentionCall) -> Output:
        return call.softmax()


class OtherRecurrence(Mode):
    """A mode that evaluates a modified recurrence, such as one with a side left out."""

    def attend(self, call: AttentionCall) -> Output:
        return call.linear(self.replacement)

    @abstractmethod
    def replacement(self, record: Recurrence) -> Recurrence:
        """Return the recurrence that is evaluated instead of `record`."""


class WindowOnly(OtherRecurrence):
    """A windowed layer without its linear side: a token sees only those in its window, and the
    sinks."""

    def replacement(self, record: Recurrence) -> Recurrence:
        return require_window(record, type(self).__name__).map_groups(_window_alone)


class LinearOnly(OtherRecurrence):
    """A windowed layer without its window and sinks: its rule alone, to all tokens. Sinks beside
    landmarks are features of the rule, and stay."""

    def replacement(self, record: Recurrence) -> Recurrence:
        return hide_windows(record)


def _window_alone(record: Windowed | WindowedLinear) -> Recurrence:
    if record.sinks and getattr(record, "log_scale", None) is not None:
        return without_landmarks(record)
    record = without_log_scale(record)
    return replace(record, mix=torch.ones_like(record.mix), shared=False)


def set_window(record: Recurrence, window: int) -> Recurrence:
    """Return a record with a window, or of groups that have windows, with one of this length."""
    return record.map_groups(lambda group: replace(group, window=window))


def hide_windows(record: Recurrence) -> Recurrence:
    """Return the record, which has windows, whose rule covers all tokens, without softmax."""
    windowed = require_window(record, "a rule alone")
    return windowed.map_groups(lambda group: replace(group, window=0, sinks=0))


def without_landmarks(record: Any) -> WindowedLinear:
    """Return the record whose queries read sinks, and no landmarks."""
    fq = features(record.fq)
    sinks = fq[..., -record.sinks :]
    return replace(record, fq=F.pad(sinks, (fq.shape[-1] - record.sinks, 0)))


def without_log_scale(record: Windowed | WindowedLinear) -> Windowed | WindowedLinear:
    """Return the record whose window knows of no scale that it has in common with the rule."""
    return replace(record, log_scale=None) if isinstance(record, WindowedLinear) else record


def has_window(record: Recurrence) -> bool:
    """Whether all heads of a record have a window of softmax."""
    return all(isinstance(group, Windowed | WindowedLinear) for group in record.by_heads())


def require_window(record: Recurrence, what: str) -> Recurrence:
    """Return `record`, all of whose heads must have a window of softmax.

    Args:
        record: The record.
        what: Needs the window; the error says so.

    Raises:
        TypeError: If one has none.
    """
    if not has_window(record):
        raise TypeError(
            f"{what} needs a layer with a window, and this layer's rule is a"
            f" {type(record).__name__} alone; use Student or Teacher, or a loss that compares"
            " outputs"
        )
    return record
