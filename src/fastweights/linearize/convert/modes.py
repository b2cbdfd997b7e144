"""What a linearized layer returns: the linear attention, the softmax one, or something made of
both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from fastweights.recurrence import Recurrence, WindowedLinear
from fastweights.recurrence.mapped import features
from fastweights.shapes import Mask, Output

if TYPE_CHECKING:
    from fastweights.linearize.convert.branch import LinearBranch


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a linearized layer's attention.

    Attributes:
        q: ``[b t h k]``, after norms and RoPE
        k, v: ``[b t g k]``, ``[b t g v]`` with g | h
        keep: ``[b t]``, False for padding; None if there is none
        record: the branch's recurrence on these streams, with padding and packed documents
            applied
        linear: the branch's output ``[b t h v]``, which advances the cache if there is one;
            given a function, the output of what it makes of the branch's recurrence
        softmax: the output ``[b t h v]`` of the model's own attention, in its own dtype
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
    """What the converted layers of a model do, set by `running`."""

    constant: ClassVar[bool] = True
    """Whether layers keep the constant-size state in the cache; False: all keys and values, as the
    softmax needs.
    """

    @abstractmethod
    def attend(self, call: AttentionCall) -> Output:
        """``[b t h v]``"""


class Student(Mode):
    """The branch: what a linearized model does unless told otherwise."""

    def attend(self, call: AttentionCall) -> Output:
        return call.linear()


class Teacher(Mode):
    """The softmax attention that was there before: the original model, without a second copy of its
    weights.
    """

    constant = False

    def attend(self, call: AttentionCall) -> Output:
        return call.softmax()


class OtherRecurrence(Mode):
    """Another recurrence than the branch's own."""

    def attend(self, call: AttentionCall) -> Output:
        return call.linear(self.replacement)

    @abstractmethod
    def replacement(self, record: Recurrence) -> Recurrence:
        """What is evaluated instead of `record`."""


class WindowOnly(OtherRecurrence):
    """`WindowedLinear` without the tokens before its window."""

    def replacement(self, record: Recurrence) -> Recurrence:
        window = require_window(record, self)
        return replace(window, fq=0 * features(window.fq))


class LinearOnly(OtherRecurrence):
    """`WindowedLinear` without a window: normalised linear attention to all tokens."""

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


LINEAR = Student()


@contextmanager
def use_mode(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Inside the block every converted layer of `model` does what `mode` says."""
    from fastweights.linearize.convert.attention import attentions_with_branch

    layers = attentions_with_branch(model)
    before = [layer.linear_mode for layer in layers]
    for layer in layers:
        layer.linear_mode = mode
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.linear_mode = old
