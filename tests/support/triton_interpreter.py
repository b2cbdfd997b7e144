"""Triton's interpreter made fit for tests: bfloat16 that is computed right.

Importing it needs TRITON_INTERPRET=1 from before Triton's first import. The interpreter holds
bfloat16 as the bits of 16-bit integers and computes on those; here it computes in float32 and
rounds back, as a GPU does. It hands out the numbers of `range` as Python's, which have no ``.to``:
`number_as_tensors` mends that for other libraries' kernels, which use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder


def install() -> None:
    """Mend bfloat16 in the interpreter of this process, and leave kernels untuned."""
    Autotuner.__init__ = _with_one_configuration(Autotuner.__init__)
    for name in ("binary_op", "unary_op"):
        setattr(Builder, name, _in_float32(getattr(Builder, name)))
    Builder.create_dot = _dot_in_float32(Builder.create_dot)
    Builder.get_bf16 = lambda self, number: Handle(_bits(np.array([number])), tl.bfloat16)
    Builder.cast_impl = _cast_from_float32(Builder.cast_impl)
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = _reduce_in_float32(kind.apply_impl)


def _with_one_configuration(make: Callable[..., None]) -> Callable[..., None]:
    """Of an autotuner, which would time several on a device that is not there."""

    def made(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        make(self, fn, names, configs[:1], *rest, **options)

    return made


class _Index(int):
    """A number of a `range`, with a tensor's ``.to``."""

    def to(self, kind: Any, *_: Any) -> Any:
        numbers = np.array([int(self)], dtype=interpreter._get_np_dtype(kind))
        return tl.core.tensor(Handle(numbers, kind), kind)


def number_as_tensors(modules: Iterable[ModuleType]) -> None:
    """Let the numbers of `range` in these modules have the ``.to`` that they have on a GPU."""
    for module in modules:
        module.range = lambda *bounds: map(_Index, range(*map(int, bounds)))  # type: ignore[attr-defined]


def _is_bfloat16(x: Any) -> bool:
    return isinstance(x, Handle) and x.dtype.scalar == tl.bfloat16


def _widen(x: Any) -> Any:
    """float32 for bfloat16, anything else as it is."""
    if not _is_bfloat16(x):
        return x
    return Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _bits(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(numbers.astype(np.float32)).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Of an operation on one or two tiles."""

    def mended(self: Any, *arguments: Any) -> Any:
        *tiles, operation = arguments
        if not any(map(_is_bfloat16, tiles)):
            return compute(self, *arguments)
        found = operation(*(_widen(x).data for x in tiles))
        if found.dtype == np.bool_:
            return Handle(found, tl.int1)
        return Handle(_bits(found), tl.bfloat16)

    return mended


def _dot_in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    def mended(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return compute(self, _widen(a), _widen(b), d, *rest)

    return mended


def _cast_from_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    def mended(self: Any, source: Any, kind: Any) -> Any:
        if _is_bfloat16(source) and kind.scalar != tl.bfloat16:
            wide = _widen(source)
            return wide if kind.scalar == tl.float32 else compute(self, wide, kind)
        if kind.scalar == tl.bfloat16 and not _is_bfloat16(source):
            return Handle(_bits(source.data.astype(np.float32)), tl.bfloat16)
        return compute(self, source, kind)

    return mended


def _reduce_in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    def widened(x: Any) -> Any:
        if not _is_bfloat16(x.handle):
            return x
        kind = tl.core.block_type(tl.float32, x.type.shape) if x.type.is_block() else tl.float32
        return tl.core.tensor(_widen(x.handle), kind)

    def mended(self: Any, inputs: Any) -> Any:
        return compute(
            self, tuple(map(widened, inputs)) if isinstance(inputs, tuple) else widened(inputs)
        )

    return mended


install()
