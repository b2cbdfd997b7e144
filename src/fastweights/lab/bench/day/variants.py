"""Kernels launched in other ways, fixed before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from fastweights.kernels.triton import chunks, mesa
from fastweights.kernels.triton.chunks import Chunks, Tiles, block_of
from fastweights.kernels.triton.launch import launch_with

AS_IS = "as is"
NO_STEEP, ONE_PART = "steep kernels not launched", "conjugate gradients in one part"


@contextmanager
def state_walk(keys: int, values: int, warps: int, stages: int) -> Iterator[None]:
    """Inside the block states are walked in such tiles."""

    def tiles(of: Chunks) -> Tiles:
        return Tiles(block_of(of.keys, keys), block_of(of.values, values), warps, stages)

    with patch.object(chunks, "state_tiles", tiles):
        yield


@contextmanager
def without_steep() -> Iterator[None]:
    """Inside the block kernels that only steep decays need are left out: right for gentle ones."""

    def run(
        kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if not kernel.__name__.startswith("steep_"):
            kernel[grid](*arguments, **options)

    with launch_with(run):
        yield


def one_part() -> AbstractContextManager[object]:
    """Inside the block Mesa's products are made of single bfloat16 numbers."""
    return patch.object(mesa.System, "parts", lambda system, right: 1)


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    AS_IS: nullcontext,
    "states 64×64, 4 warps, 3 stages": partial(state_walk, 64, 64, 4, 3),
    "states 128×64, 8 warps, 3 stages": partial(state_walk, 128, 64, 8, 3),
    "states 128×128, 8 warps, 3 stages": partial(state_walk, 128, 128, 8, 3),
    NO_STEEP: without_steep,
    ONE_PART: one_part,
}

_WALKS = tuple(name for name in VARIANTS if name.startswith("states"))
OF: dict[str, tuple[str, ...]] = {
    "decay scalar": (AS_IS, *_WALKS),
    "decay tied": (AS_IS, *_WALKS, NO_STEEP),
    "mesa 30 steps": (AS_IS, ONE_PART),
}
"""Which are tried on which case."""
