"""What a GPU offers a kernel, from which its configuration follows by rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """Attributes:
    capability: 80, 86, 89, 90, 100, …
    multiprocessors: how many
    shared_memory: bytes that one block of threads may have
    """

    capability: int
    multiprocessors: int
    shared_memory: int


CHIPS = {
    80: Chip(80, 108, 163 << 10),  # A100
    86: Chip(86, 84, 99 << 10),  # RTX 3090
    89: Chip(89, 128, 99 << 10),  # RTX 4090, L40
    90: Chip(90, 132, 227 << 10),  # H100, H200
    100: Chip(100, 148, 227 << 10),  # B200
}
"""By capability, what kernels are compiled for where no GPU is asked."""

_pretended: ContextVar[Chip | None] = ContextVar("pretended", default=None)


@contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Inside the block kernels are configured for this chip, whatever the machine has."""
    token = _pretended.set(chip)
    try:
        yield
    finally:
        _pretended.reset(token)


def chip_of(device: torch.device) -> Chip:
    """The GPU of a device; of one without, the H100's numbers."""
    return _pretended.get() or (_ask(device) if device.type == "cuda" else CHIPS[90])


@cache
def _ask(device: torch.device) -> Chip:
    found = torch.cuda.get_device_properties(device)
    memory = getattr(found, "shared_memory_per_block_optin", CHIPS[86].shared_memory)
    return Chip(10 * found.major + found.minor, found.multi_processor_count, memory)
