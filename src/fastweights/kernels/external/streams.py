"""What the libraries' kernels take, and when they cannot be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.triton.launch import INTERPRETED
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.derivatives import redefine

DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
"""Where the kernels' entries of the table read streams: what is written in Triton can be
interpreted.
"""

EMPTYING = -100.0
"""The log decay that stands for anything steeper: e^-100 is 0 beside any number that float32 holds,
and differences of sums of it, which the libraries exponentiate, still are numbers.
"""

HALF = (torch.bfloat16, torch.float16)


@cache
def is_installed(module: str) -> bool:
    """Whether a module can be imported."""
    return find_spec(module) is not None


def needs_gradients(record: Recurrence) -> bool:
    """Whether autograd follows a stream of the record here."""
    return torch.is_grad_enabled() and any(s.requires_grad for s in record.streams.values())


def refuse_record(record: Recurrence, shortest: int) -> str | None:
    """Why no kernel of another library takes a record: its dtype, length or surroundings."""
    if record.output not in HALF:
        return f"its output is {record.output}, more digits than it multiplies"
    if len(record) < shortest:
        return f"it has {len(record)} tokens, fewer than {shortest}"
    if torch.compiler.is_compiling():
        return "torch.compile does not look into it"
    return None


def differentiable_again(compute: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Have another library's kernel have gradients of gradients: those of the rule's chunks."""

    @wraps(compute)
    def compute_redefined(record: Recurrence, state: Tensor) -> tuple[Tensor, ...]:
        def define(*given: Tensor) -> Any:
            streams = dict(zip(record.streams, given[:-1], strict=True))
            return chunk_loop(replace(record, **streams), given[-1])

        return redefine(define, compute(record, state), *record.streams.values(), state)

    return compute_redefined


def refuse_missing(*modules: str) -> str | None:
    """Why a library cannot be imported, by the modules that it needs."""
    for module in modules:
        if not is_installed(module):
            return f"{module} is not installed"
    return None


def expand(record: Recurrence, *streams: Tensor) -> Iterator[Tensor]:
    """Streams as ``[b t h ·]`` in the dtype of the output, everything spelled out."""
    for stream in streams:
        yield stream.to(record.output).expand(*record.shape, -1).contiguous()


def finite_decay(record: Recurrence, log_decay: Tensor) -> Tensor:
    """Log decays ``[b t h ·]`` in float32, none below `EMPTYING`."""
    wide = log_decay.float().clamp(min=EMPTYING)
    return wide.expand(*record.shape, -1).contiguous()


def run_chunks(
    chunks: Callable[..., tuple[Tensor, Tensor]],
    record: Decay | Delta,
    state: Tensor,
    key: Tensor,
    *,
    per_head: bool = False,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """(o, final state) by a library's function of all chunks, whose arguments they agree on.

    Args:
        chunks: the function
        record: to evaluate
        state: before it
        key: of the record
        per_head: whether the function has one decay per head, not one per key channel
        options: of this library alone
    """
    decay = None if record.log_decay is None else finite_decay(record, record.log_decay)
    if decay is not None and per_head:
        decay = decay.squeeze(-1)
    if (beta := record.streams.get("beta")) is not None:
        options["beta"] = next(expand(record, beta)).squeeze(-1)
    q, k, v = expand(record, record.q, key, record.v)
    options |= {"scale": 1.0, "initial_state": state, "output_final_state": True}
    return chunks(q=q, k=k, v=v, g=decay, **options)
