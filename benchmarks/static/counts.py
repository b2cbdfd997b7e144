"""What launches move, multiply and exponentiate, counted while Triton's interpreter runs them.

The process needs TRITON_INTERPRET=1 from its start.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.kernels.triton.launch import launch_with
from static.passes import PASSED
from static.work import CountedLaunch, Counts

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from triton.runtime.interpreter import InterpreterBuilder as Builder

import triton_interpreter  # noqa: F401  (bfloat16 is computed right from here on)

SECTOR = 32
"""Bytes that memory hands out together."""

CACHE = 64 << 10
"""Bytes that a program finds again beside its shared memory."""

SPECIAL = (np.exp, np.exp2, np.log, np.log2, np.sqrt, np.sin, np.cos, np.divide)
"""numpy's names of what the special-function units compute; a quotient takes a reciprocal."""


@dataclass
class _Tally:
    """Attributes:
    read, written: all sectors so far
    cached: those that the program has read last, at most `CACHE` bytes
    """

    loaded: int = 0
    stored: int = 0
    half_products: int = 0
    tf32_products: int = 0
    special: int = 0
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)

    def load(self, sectors: list[int]) -> None:
        """Count those that are not cached; a full cache is emptied."""
        missing = set(sectors) - self.cached
        self.loaded += SECTOR * len(missing)
        self.read |= missing
        if SECTOR * (len(self.cached) + len(missing)) > CACHE:
            self.cached.clear()
        self.cached.update(sectors)

    def counts(self) -> Counts:
        touched = SECTOR * (len(self.read) + len(self.written))
        work = self.half_products, self.tf32_products, self.special
        return Counts(self.loaded, self.stored, touched, *work)


@contextmanager
def counting() -> Iterator[list[CountedLaunch]]:
    """Inside the block every launch is counted as it is interpreted."""
    launches: list[CountedLaunch] = []

    def run(
        kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        tally = _Tally()
        PASSED.clear()
        with _tallied(tally):
            kernel[grid](*arguments, **options)
        found = tally.counts(), Counter(PASSED)
        launches.append(CountedLaunch(kernel.fn.__name__, grid, *found))

    with launch_with(run):
        yield launches


@contextmanager
def _tallied(tally: _Tally) -> Iterator[None]:
    """What the interpreter does inside the block is added to `tally`."""

    def load(original: Callable[..., Any], self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        tally.load(_sectors(pointers, mask))
        return original(self, pointers, mask, *rest)

    def store(
        original: Callable[..., Any], self: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        tally.stored += _bytes(pointers, mask)
        tally.written.update(_sectors(pointers, mask))
        return original(self, pointers, value, mask, *rest)

    def dot(original: Callable[..., Any], self: Any, a: Any, b: Any, *rest: Any) -> Any:
        operations = 2 * a.data.size * b.data.shape[-1]
        if a.data.dtype.itemsize == 2:
            tally.half_products += operations
        else:
            tally.tf32_products += 3 * operations
        return original(self, a, b, *rest)

    def operate(original: Callable[..., Any], self: Any, *arguments: Any) -> Any:
        result = original(self, *arguments)
        if arguments[-1] in SPECIAL:
            tally.special += result.data.size
        return result

    def root(original: Callable[..., Any], self: Any, x: Any) -> Any:
        tally.special += x.data.size
        return original(self, x)

    def begin(original: Callable[..., Any], self: Any, *place: int) -> None:
        tally.cached.clear()
        original(self, *place)

    wrapped = {
        "set_grid_idx": begin,
        "create_masked_load": load,
        "create_masked_store": store,
        "create_dot": dot,
        "unary_op": operate,
        "binary_op": operate,
        "create_rsqrt": root,
    }
    before = {name: getattr(Builder, name) for name in wrapped}
    try:
        for name, count in wrapped.items():
            setattr(Builder, name, _bound(count, before[name]))
        yield
    finally:
        for name, original in before.items():
            setattr(Builder, name, original)


def _bound(count: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments: count(original, self, *arguments)


def _bytes(pointers: Any, mask: Any) -> int:
    width = pointers.get_element_ty().primitive_bitwidth // 8
    return int(np.broadcast_to(mask.data, pointers.data.shape).sum()) * width


def _sectors(pointers: Any, mask: Any) -> list[int]:
    wanted = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    return np.unique(pointers.data[wanted] // SECTOR).tolist()
