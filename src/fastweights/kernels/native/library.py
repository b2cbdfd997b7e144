"""The shared library: found, loaded, and called with tensors."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.kernels.native.abi import pack
from fastweights.kernels.native.build import LIBRARY, source_hash
from fastweights.kernels.tracing import assume_constant_result

_PLAIN = (Tensor, nn.Parameter)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled extension, or None where it was not built, does not load, or is of other sources
    than those here.
    """
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    if _source_hash_of(found) == source_hash():
        return found
    warnings.warn(
        f"{LIBRARY} is older than its sources and is left out; install fastweights again",
        stacklevel=2,
    )
    return None


def _source_hash_of(loaded: ctypes.CDLL) -> int | None:
    try:
        return ctypes.c_int64.in_dll(loaded, "fw_sources").value
    except ValueError:
        return None


@assume_constant_result
def extension_missing() -> bool:
    """Whether there is no extension to call."""
    return library() is None


def refuse_tensors(*tensors: Tensor | None) -> str | None:
    """Why C cannot read these, None if it can: it takes float32 on the CPU, neither of a subclass
    nor under a transform of torch.func.
    """
    if extension_missing():
        return "the compiled extension is missing (python -m fastweights.kernels.native.build)"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func looks into it"
    for t in tensors:
        if t is not None and not (type(t) in _PLAIN and t.dtype == torch.float32 and t.is_cpu):
            return f"a {type(t).__name__} of {t.dtype} on {t.device.type} is not plain float32"
    return None


@assume_constant_result
def read_constant(name: str) -> int:
    """A number that the C code exports."""
    return _read_constant(name)


@cache
def _read_constant(name: str) -> int:
    return ctypes.c_int64.in_dll(_require_library(), name).value


def call(name: str, structure: Any) -> int:
    """Call the C function `name` with a pointer to a structure of `abi`."""
    return getattr(_require_library(), name)(pack(structure))


def _require_library() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "the kernels refuse every record where the extension is missing"
    return loaded


def threads(elements: int) -> int:
    """Threads worth using for a computation that touches `elements` numbers of state."""
    return 1 if elements < 1 << 16 else torch.get_num_threads()
