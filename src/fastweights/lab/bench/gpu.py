"""Our kernels on a device against float64 on the CPU, and how often they make the host wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch

from fastweights.lab.bench.cases import OURS, RecurrenceCase
from fastweights.lab.bench.contenders import (
    Case,
    Implementation,
    Inputs,
    Phase,
    Sizes,
    bind,
    dtype_name,
)
from fastweights.lab.bench.ops import Errors, Exact, errors_on
from fastweights.lab.bench.timing import Failure
from fastweights.methods import evaluate
from fastweights.recurrence.streams import state_parts


@dataclass(frozen=True)
class CheckRow:
    """The errors of one of our kernels on the device.

    Attributes:
        syncs: How often forward and backward made the host wait; None where that cannot be counted.
        state: Dtype of the state, apart from cached tokens.
    """

    op: str
    sizes: Sizes
    dtype: str
    device: str
    contender: str
    auto: bool
    error: float | None
    gradient_error: float | None
    syncs: int | None
    state: str
    note: str


def check_kernels(
    case: Case, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> list[CheckRow]:
    """Check every kernel of ours that accepts the case, and return one row for each."""
    inputs = case.inputs(sizes, dtype, device)
    ours = [c for c in case.implementations(inputs) if c.library == OURS]
    exact = Exact.of(case, inputs)
    rows = []
    for contender in ours:
        errors, syncs, state = _check_kernel(case, contender, inputs, exact, device)
        row = CheckRow(
            op=case.name,
            sizes=sizes,
            dtype=dtype_name(dtype),
            device=device.type,
            contender=contender.name,
            auto=contender is ours[0],
            error=errors.output,
            gradient_error=errors.gradients,
            syncs=syncs,
            state=state,
            note=errors.reason,
        )
        rows.append(row)
    return rows


def _check_kernel(
    case: Case, contender: Implementation, inputs: Inputs, exact: Exact, device: torch.device
) -> tuple[Errors, int | None, str]:
    """Its errors, how often the host waits, and the state's dtype, as far as it is not broken."""
    syncs, state = None, ""
    try:
        errors = errors_on(case, contender.load(), inputs, exact)
        syncs = host_waits(bind(contender.load(), inputs, Phase.BOTH), device)
        state = _state_dtype(case, inputs)
    except Exception as error:
        errors = Errors(reason=Failure.of(error).reason)
    return errors, syncs, state


def host_waits(function: Callable[[], object], device: torch.device) -> int | None:
    """Count how often a second call makes the host wait for the device (CUDA only)."""
    if device.type != "cuda":
        return None
    function()
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # not what torch says once: that this mode does not yet detect "all synchronizing operations"
    return sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)


def _state_dtype(case: Case, inputs: Inputs) -> str:
    if not isinstance(case, RecurrenceCase):
        return ""
    with torch.no_grad():
        _, state = evaluate(case.record(inputs))
    numbers = [s.dtype for s in state_parts(state) if s.dtype != torch.long]
    return dtype_name(reduce(torch.promote_types, numbers))
