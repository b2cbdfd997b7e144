"""A forward and a backward made of kernels, as one differentiable operation.

Eager code calls them through one autograd function. torch.compile does not look into them: there
the same two functions are operators of torch, whose results on tensors without numbers are their
shapes (`launch` starts nothing then).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fastweights.kernels.rehearsal import assume_constant_result
from fastweights.recurrence.derivatives import differentiable_by

Streams = tuple[Tensor | None, ...]


class NoSettings(NamedTuple):
    """Of an operation that its streams say all about."""


class OperatorResult(NamedTuple):
    """What a forward returns: its outputs, and other tensors that the backward needs beside the
    streams.
    """

    outputs: tuple[Tensor, ...]
    saved: Streams = ()


OPERATORS: dict[str, TritonOperator] = {}
"""By name, since torch 2.11 folds a function of constants alone, and no record is one."""


@dataclass(frozen=True, eq=False)
class TritonOperator:
    """One differentiable operation on streams.

    Attributes:
        name: of the operator, ``fastweights::triton_<name>``
        settings: a NamedTuple class of ints, floats and bools: all that is no tensor
        streams: the names of its tensors, in order
        outputs: how many tensors it returns
        forward: ``(settings, streams, keep)`` → `OperatorResult`; `keep` says whether a backward
            follows
        backward: ``(settings, streams, saved, gradients of the outputs, wanted)`` → a gradient
            or None per stream; `wanted` says of each stream whether its gradient is asked for
        define: ``(settings, streams)`` → the outputs, by operations of torch: for gradients of
            gradients
        reread: how many of the outputs, the first ones, the backward finds in `saved`, before what
            the forward saved
    """

    name: str
    settings: type
    streams: tuple[str, ...]
    outputs: int
    forward: Callable[[Any, Streams, bool], OperatorResult]
    backward: Callable[[Any, Streams, Streams, tuple[Tensor, ...], Sequence[bool]], Streams]
    define: Callable[[Any, Streams], tuple[Tensor, ...]]
    reread: int = 0

    def __post_init__(self) -> None:
        OPERATORS[self.name] = self

    def __call__(self, settings: Any, *streams: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs, differentiable in the streams."""
        if torch.compiler.is_compiling():
            compiled = getattr(torch.ops.fastweights, registered_name(self.name))
            return tuple(compiled(*settings, *streams)[: self.outputs])
        if torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in streams):
            return _Apply.apply(self, settings, *streams)  # type: ignore[return-value]
        return self.forward(settings, streams, False).outputs

    def register(self) -> None:
        """Make it an operator of torch, with its backward."""
        hints = get_type_hints(self.settings)
        kinds = [f"{kind.__name__} {name}" for name, kind in hints.items()]
        tensors = [f"Tensor? {name}" for name in self.streams]
        name, numbers = f"fastweights::triton_{self.name}", len(kinds)

        def compute(*arguments: Any) -> list[Tensor]:
            outputs, saved = self.forward(
                self.settings(*arguments[:numbers]), arguments[numbers:], True
            )
            return [*outputs, *(_or_empty(s, outputs[0]) for s in saved)]

        def differentiate(*arguments: Any) -> list[Tensor]:
            wanted, saved, gradients, *streams = arguments[numbers:]
            found = self.backward(
                self.settings(*arguments[:numbers]),
                tuple(streams),
                tuple(_or_none(s) for s in saved),
                tuple(gradients),
                wanted,
            )
            return [_or_empty(g, gradients[0]) for g in found]

        forward = torch.library.custom_op(
            name,
            compute,
            mutates_args=(),
            schema=f"({', '.join([*kinds, *tensors])}) -> Tensor[]",
        )
        results = ["bool[] wanted", "Tensor[] saved", "Tensor[] gradients"]
        backward = torch.library.custom_op(
            f"{name}_backward",
            differentiate,
            mutates_args=(),
            schema=f"({', '.join([*kinds, *results, *tensors])}) -> Tensor[]",
        )
        forward.register_fake(compute)
        backward.register_fake(differentiate)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
            ctx.settings, streams = inputs[:numbers], inputs[numbers:]
            ctx.save_for_backward(*streams, *output[: self.reread], *output[self.outputs :])

        def differentiate_graph(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
            streams = ctx.saved_tensors[: len(tensors)]
            wanted = list(ctx.needs_input_grad[numbers:])
            saved, gradients = ctx.saved_tensors[len(tensors) :], gradients[: self.outputs]
            found = backward(*ctx.settings, wanted, list(saved), list(gradients), *streams)
            return *(None for _ in ctx.settings), *_asked_for(found, wanted)

        forward.register_autograd(differentiate_graph, setup_context=keep)


@assume_constant_result
def registered_name(name: str) -> str:
    """What the operator is called in ``torch.ops.fastweights``, where it stands from then on."""
    return _register_once(name)


@cache
def _register_once(name: str) -> str:
    OPERATORS[name].register()
    return f"triton_{name}"


def _by_torch(
    operator: TritonOperator, settings: Any, *streams: Tensor | None
) -> tuple[Tensor, ...]:
    return operator.define(settings, streams)


class _Apply(torch.autograd.Function):
    """The outputs of an `TritonOperator`, its settings and its streams."""

    @staticmethod
    def forward(ctx: Any, operator: TritonOperator, settings: Any, *streams: Tensor | None) -> Any:
        outputs, saved = operator.forward(settings, streams, True)
        ctx.operator, ctx.settings, ctx.count = operator, settings, len(streams)
        ctx.save_for_backward(*streams, *outputs[: operator.reread], *saved)
        return outputs

    @staticmethod
    @differentiable_by(
        lambda ctx: (_by_torch, (ctx.operator, ctx.settings, *ctx.saved_tensors[: ctx.count]))
    )
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kept = ctx.saved_tensors  # asked for once: activation checkpointing gives them once
        streams, saved = kept[: ctx.count], kept[ctx.count :]
        wanted = ctx.needs_input_grad[2:]
        found = ctx.operator.backward(ctx.settings, streams, saved, gradients, wanted)
        return None, None, *_asked_for(found, wanted)


def _asked_for(found: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    return [g if want else None for g, want in zip(found, wanted, strict=True)]


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operator always returns tensors: an empty one for None."""
    return like.new_empty(0) if tensor is None else tensor


def _or_none(tensor: Tensor) -> Tensor | None:
    return None if tensor.numel() == 0 else tensor
