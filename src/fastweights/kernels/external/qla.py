"""The gated delta rule of FlashQLA (0.1), written in TileLang for Hopper and Blackwell.

Written from its published signature (``flash_qla.chunk_gated_delta_rule``) and tried against a
stand-in of the same signature; it has not run here.
"""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.external.streams import (
    differentiable_again,
    needs_gradients,
    refuse_missing,
    refuse_record,
    run_chunks,
)
from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.chips import chip_of
from fastweights.recurrence.delta import Delta

CHIPS = (90, 100, 103, 120, 121)
FORWARD_ONLY = (120, 121)
WIDTH = 128
SHORTEST = 64
"""Tokens of one of its chunks."""


@differentiable_again
def compute_flash_qla(record: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state); time is not cut by itself, for which it would look at the decays' numbers
    and wait for the GPU.
    """
    from flash_qla import chunk_gated_delta_rule

    o, last = run_chunks(
        chunk_gated_delta_rule, record, state, record.k, per_head=True, auto_cp=False
    )
    return o.to(record.output), last


def refuse_flash_qla(record: Delta) -> str | None:
    """Why FlashQLA does not take a record."""
    if record.log_decay is None or record.log_decay.shape[-1] > 1:
        return "it has not one decay per head"
    _, keys, values = record.operation_sizes
    if (keys, values) != (WIDTH, WIDTH):
        return f"its states are {keys} × {values}, not {WIDTH} × {WIDTH}"
    missing = refuse_missing("flash_qla")
    if missing is not None:
        return missing
    capability = chip_of(record.device).capability
    if capability not in CHIPS:
        return f"it is for GPUs of capability {', '.join(map(str, CHIPS))}, not {capability}"
    if capability in FORWARD_ONLY and needs_gradients(record):
        return f"it has no backward for capability {capability}"
    return refuse_record(record, SHORTEST)


FLASH_QLA = Kernel(
    "gated delta (FlashQLA)", Delta, compute_flash_qla, refuse_flash_qla, ("cuda",), True
)
