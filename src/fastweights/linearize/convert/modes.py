"""What a linearized layer returns: the linear attention, the softmax one, or something made of
both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fastweights.linearize.convert.branch import LinearBranch
from fastweights.recurrence import Recurrence, WindowedLinear
from fastweights.recurrence.mapped import features
from fastweights.shapes import Mask, Output


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a linearized layer's attention, with both of its possible outputs.

    Attributes:
        layer: the layer's number.
        branch: the layer's linear branch.
        q: queries ``[b t h k]``, after norms and rotary positions.
        k: keys ``[b t g k]`` of g key heads, g | h.
        v: values ``[b t g v]``.
        keep: ``[b t]``, False for padding; None if there is none.
        record: makes the branch's recurrence on these streams, with padding and packed documents
            applied.
        linear: computes the branch's output ``[b t h v]``, and advances the cache if there is one;
            given a function, the output of what it makes of the branch's recurrence.
        softmax: computes the output ``[b t h v]`` of the model's own attention, in its own dtype.
    """

    layer: int
    branch: LinearBranch
    q: Tensor
    k: Tensor
    v: Tensor
    keep: Mask | None
    record: Callable[[], Recurrence]
    linear: Callable[..., Output]
    softmax: Callable[[], Output]


class Mode(ABC):
    """What the converted layers of a model do when they are called; `use_mode` sets it.

    A mode of one's own overrides `attend`, and may return whatever it makes of the call.
    """

    constant: ClassVar[bool] = True
    """True: the cache holds the state of constant size. False: all keys and values, which softmax
    needs.
    """

    @abstractmethod
    def attend(self, call: AttentionCall) -> Output:
        """What the layer returns for `call`, ``[b t h v]``."""


class Student(Mode):
    """Linear attention: what a linearized model does unless told otherwise."""

    def attend(self, call: AttentionCall) -> Output:
        return call.linear()


class Teacher(Mode):
    """The softmax attention that was there before: the original model, without a second copy of
    its weights.
    """

    constant = False

    def attend(self, call: AttentionCall) -> Output:
        return call.softmax()


class OtherRecurrence(Mode):
    """The output of another recurrence than the branch's own, such as one with a side left out."""

    def attend(self, call: AttentionCall) -> Output:
        return call.linear(self.replacement)

    @abstractmethod
    def replacement(self, record: Recurrence) -> Recurrence:
        """What is evaluated instead of `record`."""


class WindowOnly(OtherRecurrence):
    """A windowed layer without its linear side: only the tokens in its window are seen."""

    def replacement(self, record: Recurrence) -> Recurrence:
        window = require_window(record, self)
        return replace(window, fq=0 * features(window.fq))


class LinearOnly(OtherRecurrence):
    """A windowed layer without its window: normalised linear attention to all tokens."""

    def replacement(self, record: Recurrence) -> Recurrence:
        return replace(require_window(record, self), window=0)


def require_window(record: Recurrence, mode: Mode) -> WindowedLinear:
    """`record`, or a TypeError if it has no window."""
    if not isinstance(record, WindowedLinear):
        raise TypeError(
            f"{type(mode).__name__} takes a side away from a WindowedLinear, and this layer's rule"
            f" is a {type(record).__name__}, which has none; use Student or Teacher"
        )
    return record
