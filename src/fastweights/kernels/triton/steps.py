"""One token of every rule without gradients, as decoding takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.kernels.composed import compute_composed
from fastweights.kernels.table import Kernel, refuse_complex
from fastweights.kernels.triton.decay import expand_streams
from fastweights.kernels.triton.launch import DEVICES, launch, refuse_missing
from fastweights.kernels.triton.streams import (
    NARROW,
    ceiling,
    next_power,
    place_of_next,
    strided,
)
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Normalized
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.mesa import Mesa
from fastweights.recurrence.solvers import ConjugateGradient

TILE = 2048
"""Elements of the states that one program reads and writes, of one head or of several."""
WIDEST_KEYS = 1024
WIDEST_SYSTEM = 128
"""The most keys of a Mesa whose H stays in one program's registers."""


def _width(record: Recurrence, name: str) -> int:
    found = record.streams.get(name)
    return 0 if found is None else found.shape[-1]


def _empty_output(record: Recurrence) -> Tensor:
    b, t, h = record.shape
    return torch.empty(b, t, h, record.values, dtype=record.output, device=record.device)


def advance(record: Decay | Delta | Bonus, before: Tensor) -> tuple[Tensor, Tensor]:
    """(o, state after the token)."""
    from fastweights.kernels.triton.device import steps as device

    if torch.is_grad_enabled() and before.requires_grad:
        return record.step(before)
    (b, _, h), keys, values = record.shape, record.q.shape[-1], record.values
    height = next_power(keys)
    width = min(next_power(values), max(8, TILE // height))
    together = min(next_power(h), max(1, TILE // (height * width)))
    groups, o, after = ceiling(h, together), _empty_output(record), place_of_next(before)
    skip = "bonus" if "bonus" in record.streams else "skip"
    streams = strided(*expand_streams(record, "q", "k", "v", "log_decay", "beta", skip))
    has_own = _width(record, "log_decay") == keys, _width(record, skip) == values, skip == "bonus"
    launch(
        device.advance,
        (b * groups, ceiling(values, width)),
        *(o, after, before.contiguous(), *streams),
        *(h, groups, keys, values, *has_own, together, height, width),
        num_warps=min(16, max(1, together * height * width // 512)),
    )
    return o, after


def advance_mesa(record: Mesa, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(o, (H, G) after the token)."""
    from fastweights.kernels.triton.device import steps as device

    if torch.is_grad_enabled() and any(s.requires_grad for s in state):
        return record.step(state)
    assert isinstance(record.solver, ConjugateGradient)
    (b, _, h), keys, values = record.shape, record.q.shape[-1], record.values
    o, (gram, memory) = _empty_output(record), map(place_of_next, state)
    names = ("q", "k", "v", "beta", "ridge", "log_decay")
    height = next_power(keys)
    solver = (
        record.solver.max_steps,
        float(record.solver.tol or 0.0),
        torch.finfo(torch.float32).eps / 8,
    )
    launch(
        device.advance_mesa,
        (b * h,),
        *(o, gram, memory, *(s.contiguous() for s in state)),
        *strided(*expand_streams(record, *names)),
        *(h, *solver, keys, values, height, min(next_power(values), max(8, TILE // height))),
        num_warps=min(8, max(1, height * height // 1024)),
    )
    return o, (gram, memory)


def _refuses(record: Recurrence, widest: int) -> str | None:
    if len(record) != 1:
        return f"it has {len(record)} tokens, not one"
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    if torch.is_grad_enabled() and any(s.requires_grad for s in record.streams.values()):
        return "autograd follows it"
    for stream in record.streams.values():
        if stream.dtype not in NARROW:
            return refuse_complex(record) or f"it has a stream of {stream.dtype}"
    if record.streams["q"].shape[-1] > widest:
        return f"its keys are {record.streams['q'].shape[-1]} wide, more than {widest}"
    return refuse_missing()


def refuses(record: Recurrence) -> str | None:
    """Of a state that programs share."""
    return _refuses(record, WIDEST_KEYS)


def refuses_mesa(record: Mesa) -> str | None:
    """Of a system that one program solves."""
    if not isinstance(record.solver, ConjugateGradient):
        return f"its solver is a {type(record.solver).__name__}"
    return _refuses(record, WIDEST_SYSTEM)


STEPS = [
    Kernel("decay, one token (Triton)", Decay, advance, refuses, DEVICES, True),
    Kernel("delta, one token (Triton)", Delta, advance, refuses, DEVICES, True),
    Kernel("bonus, one token (Triton)", Bonus, advance, refuses, DEVICES, True),
    Kernel("mesa, one token (Triton)", Mesa, advance_mesa, refuses_mesa, DEVICES, True),
    Kernel("normalised, one token (Triton)", Normalized, compute_composed, refuses, DEVICES),
]
