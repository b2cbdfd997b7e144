"""A kernel of Triton beside the definition of its rule in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import triton_interpreter  # noqa: F401  # its import makes the interpreter fit
from fastweights.kernels import Kernel
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.streams import pack_state
from poison import poisoned_memory

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""The largest relative error of outputs, states and gradients, by the streams' dtype."""

Streams = dict[str, Tensor | None]


def relative(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖; a wanted zero is compared absolutely."""
    wanted = wanted.detach()
    size = wanted.norm().item()
    return ((found.detach().to(wanted.dtype) - wanted).norm() / (size or 1.0)).item()


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.complex64 if x.is_complex() else dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


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
    start: Callable[..., tuple[Tensor, ...]] = lambda *states: states,
    tolerance: float | None = None,
) -> dict[str, float]:
    """Compare outputs, the final state and all gradients, under memory full of NaN.

    Args:
        kernel: the entry of the table that is tried; it must not refuse the record
        build: makes the record of streams
        streams: in float64; each is rounded to `dtype`, those of the names in `wide` to float32,
            complex ones to complex64, and the definition reads the rounded numbers
        state: whether a random state comes before the first token
        start: makes that state, one tensor after the other, of normally distributed numbers
        tolerance: another than `TOLERANCE`

    Returns:
        the relative errors by name
    """
    torch.manual_seed(0)
    kinds = {n: torch.float32 if n in wide else dtype for n in streams}
    given = {n: None if s is None else _round(s.detach(), kinds[n]) for n, s in streams.items()}
    exact = {n: None if s is None else _widen(s).requires_grad_() for n, s in given.items()}
    given = {n: None if s is None else s.clone().requires_grad_() for n, s in given.items()}

    record, definition = build(given), build(exact)
    starts = tensors_of(definition.initial_state())
    starts = [torch.randn_like(s) * 0.5 if state else s for s in starts]
    starts = [_round(s, torch.float32) for s in starts]
    before = [s.clone().requires_grad_() for s in starts]
    exactly = [_widen(s).requires_grad_() for s in starts]

    refusal = kernel.refuses(record)
    assert refusal is None, refusal
    with poisoned_memory():
        o, last = kernel.compute(record, pack_state(list(start(*before))))
        found = [o, *tensors_of(last)]
        weights = [_round(torch.randn_like(_widen(x.detach())), torch.float32) for x in found]
        sum((x * w).sum().real for x, w in zip(found, weights, strict=True)).backward()
    o, last = evaluate(definition, pack_state(list(start(*exactly))), Recurrent())
    wanted = [o, *tensors_of(last)]
    sum((x * _widen(w)).sum().real for x, w in zip(wanted, weights, strict=True)).backward()

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


Training = tuple[Tensor, dict[str, Tensor]]


def training(model: Any, ids: Tensor) -> Training:
    """The loss of a language model on ids ``[b t]``, and the gradients of its parameters."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_training(found: Training, wanted: Training) -> None:
    """Compare float32 with float64; gradients that almost vanish beside all others count little."""
    assert relative(found[0], wanted[0]) < 1e-5
    assert found[1].keys() == wanted[1].keys()
    whole = torch.cat([g.flatten() for g in wanted[1].values()]).norm()
    for name, gradient in wanted[1].items():
        error = (found[1][name].double() - gradient).norm() / (gradient.norm() + 1e-3 * whole)
        assert error < 1e-3, (name, float(error))
