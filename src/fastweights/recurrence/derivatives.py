"""Derivatives of functions whose backward is written by hand: gradients of gradients, and those
that torch's transforms ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as _C
from torch.autograd import forward_ad

Outputs = Tensor | tuple[Tensor, ...]
Definition = Callable[..., Any]
"""A function of torch's own differentiable operations, whose outputs are tensors."""


def transform_here() -> str | None:
    """Which of torch's transforms look into what is computed here, None if none does: a backward
    that is written by hand is none of theirs.
    """
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func looks into it"
    return "forward-mode differentiation follows it" if forward_ad._current_level >= 0 else None


def are_transforms_nested() -> bool:
    """Whether torch.func differentiates what is computed here more than once, as its hessian does:
    no function with a backward or a jvp of its own passes through every order of the two.
    """
    if torch.compiler.is_compiling():
        return False
    levels = [level.key() for level in _C.get_interpreter_stack() or ()]
    return sum(key in (_C.TransformType.Grad, _C.TransformType.Jvp) for key in levels) > 1


def differentiable_by(define: Callable[[Any], tuple[Definition, Sequence[Any]]]) -> Any:
    """Have the `backward` of an autograd function be differentiable in its turn.

    Where gradients are to be differentiated again, or come in batches, they are those of another
    definition of the function, which is evaluated anew.

    Args:
        define: of the ctx, a definition and what it is to be called with: what the function was,
            in the same order
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def differentiate(ctx: Any, *gradients: Any) -> Any:
            if not is_followed_on(gradients):
                return backward(ctx, *gradients)
            definition, inputs = define(ctx)
            return gradients_of(definition, inputs, ctx.needs_input_grad, gradients)

        return differentiate

    return decorate


def gradients_of(
    definition: Definition,
    inputs: Sequence[Any],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of the wanted inputs from those of the outputs, differentiable where autograd
    is on.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # views: an input may be there twice, or be made of another
        seen = [x.view_as(x) if want else x for x, want in zip(inputs, wanted, strict=True)]
        outputs = definition(*seen)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    followed = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    asked = [x for x, want in zip(seen, wanted, strict=True) if want]
    found = iter(
        torch.autograd.grad(
            *([o for o, _ in followed], asked, [g for _, g in followed]),
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return tuple(next(found) if want else None for want in wanted)


def redefine(definition: Definition, outputs: Outputs, *inputs: Tensor) -> tuple[Tensor, ...]:
    """`outputs` with their own gradients, but with those of a definition where gradients are to be
    differentiated again: for what others have written a backward of.

    Args:
        definition: of the inputs, gives the outputs
        outputs: that were computed of the inputs
        inputs: all that gradients are asked for
    """
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    if torch.compiler.is_compiling() or not any(o.requires_grad for o in found):
        return found
    return _Redefined.apply(definition, len(found), *found, *inputs)  # type: ignore[return-value]


class _Redefined(torch.autograd.Function):
    """The outputs, of a definition, of how many there are, of them and of the inputs."""

    @staticmethod
    def forward(ctx: Any, definition: Definition, count: int, *tensors: Tensor) -> Any:
        ctx.definition, ctx.count = definition, count
        ctx.save_for_backward(*tensors[count:])
        return tuple(output.view_as(output) for output in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, count = ctx.saved_tensors, ctx.count
        if not is_followed_on(gradients):
            return None, None, *gradients, *[None] * len(inputs)
        # through the definition instead of the outputs' own graph, not through both
        wanted = ctx.needs_input_grad[2 + count :]
        return None, None, *[None] * count, *gradients_of(ctx.definition, inputs, wanted, gradients)


def refuse_further(what: str, instead: str) -> Any:
    """Have the `backward` of an autograd function refuse gradients of gradients, however they are
    asked for.

    Args:
        what: is differentiated
        instead: what to do
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def differentiate(ctx: Any, *gradients: Any) -> Any:
            if is_followed_on(gradients):
                raise NotImplementedError(f"{what} has no gradients of gradients; {instead}")
            return backward(ctx, *gradients)

        return differentiate

    return decorate


def is_followed_on(gradients: Sequence[Any]) -> bool:
    """Whether what a backward makes of these is itself differentiated, or made of many at once."""
    return torch.is_grad_enabled() or any(map(_is_batch, gradients))


def require_one_at_a_time(gradients: Sequence[Any], what: str) -> None:
    """Raise for gradients, or tangents, of which torch.autograd has made one of many."""
    if torch.compiler.is_compiling():  # whose tensors are of no batch, and which cannot ask
        return
    if any(isinstance(g, Tensor) and _C.is_legacy_batchedtensor(g) for g in gradients):
        raise NotImplementedError(
            f"{what} takes no batch of gradients; ask torch.autograd for one after the other,"
            " without is_grads_batched or vectorize, or torch.func"
        )


def _is_batch(gradient: Any) -> bool:
    """Whether vmap stands behind a tensor, torch.func's or that of ``is_grads_batched``."""
    if torch.compiler.is_compiling() or not isinstance(gradient, Tensor):
        return False
    return _C.is_batchedtensor(gradient) or _C.is_legacy_batchedtensor(gradient)
