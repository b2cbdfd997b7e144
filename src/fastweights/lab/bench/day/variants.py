"""Kernels launched in other ways, fixed before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

from fastweights.kernels.triton import chunks, decay_backward, delta, mesa
from fastweights.kernels.triton.chunks import HALF, Chunks, Tiles, block_of
from fastweights.kernels.triton.launch import launch_with

AS_IS = "as is"
NO_STEEP, ONE_PART = "steep kernels not launched", "conjugate gradients in one part"
EIGHT_WARPS = "conjugate gradients in 8 warps"


@contextmanager
def tiled(module: ModuleType, name: str, wanted: Tiles) -> Iterator[None]:
    """Inside the block the kernels for whose tiles a module has such a function take these."""

    def tiles(of: Chunks, *_: object, **__: object) -> Tiles:
        fitting = (block_of(of.keys, wanted.keys), block_of(of.values, wanted.values))
        return wanted._replace(keys=fitting[0], values=fitting[1])

    with patch.object(module, name, tiles):
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


WALKS = (
    Tiles(64, 64, 4, 3, HALF),
    Tiles(128, 64, 8, 3),
    Tiles(128, 128, 8, 3),
)
READERS = (
    Tiles(64, 64, 8, 3, HALF),
    Tiles(128, 64, 8, 3),
    Tiles(128, 64, 16, 3),
)
BACK = Tiles(128, 64, 8, 2)
"""Tiles that are tried in the place of those of the kernels that walk states, of the readers'
gradients, and of the delta rule's walk back."""


def _named(kernels: str, tiles: Tiles) -> str:
    registers = f", {tiles.registers} registers" if tiles.registers else ""
    size = f"{tiles.keys}×{tiles.values}, {tiles.warps} warps, {tiles.stages} stages"
    return f"{kernels} {size}{registers}"


_WALKS = {_named("states", t): partial(tiled, chunks, "state_tiles", t) for t in WALKS}
_READERS = {
    _named("readers", t): partial(tiled, decay_backward, "reader_tiles", t) for t in READERS
}
_BACK = {_named("walk back", BACK): partial(tiled, delta, "write_back_tiles", BACK)}
VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    AS_IS: nullcontext,
    **_WALKS,
    **_READERS,
    **_BACK,
    NO_STEEP: without_steep,
    ONE_PART: one_part,
    EIGHT_WARPS: partial(tiled, mesa, "solver_tiles", Tiles(128, 128, 8, 1)),
}

OF: dict[str, tuple[str, ...]] = {
    "decay scalar": (AS_IS, *_WALKS, *_READERS),
    "delta scalar": (AS_IS, *_READERS, *_BACK),
    "decay tied": (AS_IS, *_WALKS, NO_STEEP),
    "mesa 30 steps": (AS_IS, EIGHT_WARPS, ONE_PART),
}
"""Which are tried on which case."""
