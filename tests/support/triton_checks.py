"""A kernel of Triton beside the definition of its rule in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels import Kernel
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence.base import Recurrence
from triton_interpreter import poisoned_memory

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""The largest relative error of outputs, states and gradients, by the streams' dtype."""

Streams = dict[str, Tensor | None]


def relative(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖; a wanted zero is compared absolutely."""
    wanted = wanted.detach()
    size = wanted.norm().item()
    return ((found.detach().to(wanted.dtype) - wanted).norm() / (size or 1.0)).item()


def tensors_of(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def check(
    kernel: Kernel,
    build: Callable[[Streams], Recurrence],
    streams: Streams,
    dtype: torch.dtype = torch.float32,
    *,
    wide: tuple[str, ...] = ("log_decay",),
    state: bool = True,
    tolerance: float | None = None,
) -> dict[str, float]:
    """Compare outputs, the final state and all gradients, under memory full of NaN.

    Args:
        kernel: the entry of the table that is tried; it must not refuse the record
        build: makes the record of streams
        streams: in float64; each is rounded to `dtype`, those of the names in `wide` to float32,
            and the definition reads the rounded numbers
        state: whether a random state comes before the first token
        tolerance: another than `TOLERANCE`

    Returns:
        the relative errors by name
    """
    torch.manual_seed(0)
    kinds = {n: torch.float32 if n in wide else dtype for n in streams}
    given = {n: None if s is None else s.detach().to(kinds[n]) for n, s in streams.items()}
    exact = {n: None if s is None else s.double().requires_grad_() for n, s in given.items()}
    given = {n: None if s is None else s.clone().requires_grad_() for n, s in given.items()}

    record, definition = build(given), build(exact)
    starts = tensors_of(definition.initial_state())
    starts = [torch.randn_like(s).float() * 0.5 if state else s.float() for s in starts]
    before = [s.clone().requires_grad_() for s in starts]
    exactly = [s.double().requires_grad_() for s in starts]

    refusal = kernel.refuses(record)
    assert refusal is None, refusal
    with poisoned_memory():
        o, last = kernel.compute(record, before[0] if len(before) == 1 else tuple(before))
        found = [o, *tensors_of(last)]
        weights = [torch.randn_like(x.detach(), dtype=torch.float32) for x in found]
        sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    o, last = evaluate(definition, exactly[0] if len(exactly) == 1 else tuple(exactly), Recurrent())
    wanted = [o, *tensors_of(last)]
    sum((x * w.double()).sum() for x, w in zip(wanted, weights, strict=True)).backward()

    assert found[0].dtype == record.output
    errors = {"o": relative(found[0], wanted[0])}
    for i, (a, b) in enumerate(zip(found[1:], wanted[1:], strict=True)):
        errors[f"state {i}"] = relative(a, b)
    for i, (a, b) in enumerate(zip(before, exactly, strict=True)):
        if b.grad is not None:
            errors[f"d start {i}"] = relative(a.grad, b.grad)
    for name, s in exact.items():
        if s is not None and s.grad is not None:
            errors[f"d {name}"] = relative(given[name].grad, s.grad)
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    assert all(error <= limit for error in errors.values()), errors
    return errors
