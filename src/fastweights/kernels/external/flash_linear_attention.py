"""Chunkwise kernels of flash-linear-attention (fla, 0.6), written in Triton.

They read ``[b t h d]`` and keep states ``[b h k v]`` as records do, and tune themselves to a GPU at
their first call for a shape.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from fastweights.kernels.external.streams import (
    DEVICES,
    differentiable_again,
    needs_gradients,
    refuse_missing,
    refuse_record,
    run_chunks,
)
from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.chips import chip_of
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta

SHORTEST = 2
"""A single token is no work for a chunk."""

WIDEST = 256
"""Keys of the widest states that fla's kernels hold."""


@differentiable_again
def compute_simple_gla(record: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) under one decay per head, or none."""
    from fla.ops.simple_gla import chunk_simple_gla

    o, last = run_chunks(chunk_simple_gla, record, state, record.key, per_head=True)
    return record.add_skip(o), last


@differentiable_again
def compute_gla(record: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) under one decay per key channel."""
    from fla.ops.gla import chunk_gla

    o, last = run_chunks(chunk_gla, record, state, record.key)
    return record.add_skip(o), last


@differentiable_again
def compute_gated_delta(record: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) under one decay per head."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    o, last = run_chunks(chunk_gated_delta_rule, record, state, record.k, per_head=True)
    return o.to(record.output), last


@differentiable_again
def compute_kda(record: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) under one decay per key channel."""
    from fla.ops.kda import chunk_kda

    o, last = run_chunks(chunk_kda, record, state, record.k)
    return o.to(record.output), last


def refuse_fla(record: Recurrence) -> str | None:
    """Why fla does not take a record."""
    width = record.streams["q"].shape[-1]
    if width > WIDEST:
        return f"its keys are {width} wide, wider than {WIDEST}"
    return refuse_record(record, SHORTEST) or refuse_missing("fla", "einops", "triton")


def _is_per_channel(record: Decay | Delta) -> bool:
    return record.log_decay is not None and record.log_decay.shape[-1] > 1


def refuse_per_channel(record: Decay | Delta) -> str | None:
    """Of kernels for one decay per head, whose backward a compiler translates wrongly."""
    if _is_per_channel(record):
        return "every key has a decay of its own"
    refusal = refuse_fla(record)
    if refusal is None and needs_gradients(record) and is_mistranslated(record.device):
        return "Triton 3.4 to 3.7.0 translates its backward wrongly for Hopper (fla #640)"
    return refusal


def is_mistranslated(device: torch.device) -> bool:
    """Whether Triton compiles fla's gated backwards wrongly for a device."""
    major, minor, patch, *_ = (*version("triton").split("."), "0")
    digits = int(major), int(minor), int("".join(c for c in patch if c.isdigit()) or 0)
    return (
        device.type == "cuda" and chip_of(device).capability == 90 and (3, 4) <= digits < (3, 7, 1)
    )


def refuse_per_head(record: Decay | Delta) -> str | None:
    """Of kernels for one decay per key channel."""
    return refuse_fla(record) if _is_per_channel(record) else "not every key has a decay of its own"


def _refuse_delta(record: Delta) -> str | None:
    return "nothing decays" if record.log_decay is None else refuse_per_channel(record)


FLA_SIMPLE_GLA = Kernel(
    "chunk_simple_gla (fla)", Decay, compute_simple_gla, refuse_per_channel, DEVICES, True
)
FLA_GLA = Kernel("chunk_gla (fla)", Decay, compute_gla, refuse_per_head, DEVICES, True)
FLA_GATED_DELTA = Kernel(
    "chunk_gated_delta_rule (fla)", Delta, compute_gated_delta, _refuse_delta, DEVICES, True
)
FLA_KDA = Kernel("chunk_kda (fla)", Delta, compute_kda, refuse_per_head, DEVICES, True)
