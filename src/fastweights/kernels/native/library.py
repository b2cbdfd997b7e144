"""The shared library: found, loaded, and called with tensors."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fastweights.kernels.native import abi
from fastweights.kernels.native.abi import pack
from fastweights.kernels.native.build import LIBRARY, source_hash
from fastweights.kernels.rehearsal import assume_constant_result, rehearsed

BUILD_COMMAND = "python -m fastweights.kernels.native"


NARROW = (torch.float32, torch.bfloat16)
"""What C reads where it computes in float32 and takes streams of bfloat16 as they are."""


class MissingKernelsWarning(UserWarning):
    """The compiled kernels are not there where they would have been used: torch takes over."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled extension, or None where it was not built, does not load, or is of other sources
    than those here.
    """
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def _load() -> ctypes.CDLL | str:
    """The extension, or why there is none."""
    if not LIBRARY.exists():
        return "no C compiler was found when it was installed"
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"they are built for another machine ({error})"
    return found if _source_hash_of(found) == source_hash() else "they are of other sources"


def _source_hash_of(loaded: ctypes.CDLL) -> int | None:
    try:
        return ctypes.c_int64.in_dll(loaded, "fw_sources").value
    except ValueError:
        return None


def extension_missing() -> bool:
    """Whether there is no extension to call."""
    return library() is None


@assume_constant_result
def refuse_missing() -> str | None:
    """Why C takes nothing here, None where there is an extension. It is asked last, of what C would
    take, so that its answer is also what the user is told.
    """
    if not extension_missing():
        return None
    _announce_missing()
    return f"the compiled extension is missing ({BUILD_COMMAND})"


@cache
def _announce_missing() -> None:
    """Say once, in one line, that the kernels are missing and how to get them; of the processes of
    torchrun only the first does.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    message = (
        f"fastweights runs without its compiled kernels, slower: {_load()}. To get them, install a"
        f" C compiler (gcc or clang) and run `{BUILD_COMMAND}`, or install the package again, by"
        " `pip install --no-cache-dir --force-reinstall --no-deps` and where it came from"
    )
    warnings.warn_explicit(message, MissingKernelsWarning, str(LIBRARY), 0)


def refuse_tensors(
    *tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> str | None:
    """Why C cannot read these, None if it can: see `refuse_strangers`."""
    return refuse_strangers(*tensors, dtypes=dtypes) or refuse_missing()


def refuse_strangers(
    *tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> str | None:
    """Why these are not plain tensors of some `dtypes` on the CPU, None if they are."""
    plain = (FakeTensor, nn.Parameter) if rehearsed() else (Tensor, nn.Parameter)
    for t in tensors:
        if t is not None and not (type(t) in plain and t.dtype in dtypes and t.is_cpu):
            return (
                f"a {type(t).__name__} of {t.dtype} on {t.device.type} is not plain"
                f" {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
            )
    return None


@assume_constant_result
def read_constant(name: str) -> int:
    """A number that the C code exports."""
    return _read_constant(name)


@cache
def _read_constant(name: str) -> int:
    return ctypes.c_int64.in_dll(_require_library(), name).value


def call(name: str, *structures: Any) -> None:
    """Run the kernel `name` on a structure of `abi`, or on several that lie one behind the other;
    nothing in a rehearsal. Raises MemoryError.
    """
    if ask(name, *structures):
        raise _no_memory(name)


class PreparedCall:
    """`call`, packed now, to be made any number of times: of the memory where the tensors lie.

    Args:
        kept: what has to stay as long as this does

    Attributes:
        memory: the structures as C reads them, which may be changed between two calls
    """

    def __init__(self, name: str, *structures: Any, kept: object = None) -> None:
        self._name, self._run = name, getattr(_require_library(), name)
        self._kept = structures, kept
        self.memory = ctypes.create_string_buffer(b"".join(map(pack, structures)))

    def __call__(self) -> None:
        if self._run(self.memory):
            raise _no_memory(self._name)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the function, and of what it reads."""
        function = ctypes.cast(self._run, ctypes.c_void_p).value
        assert function is not None
        return function, ctypes.addressof(self.memory)


def chain(calls: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    """The same calls, of which those of C that follow one another are one."""
    groups = [
        (of_c, list(some))
        for of_c, some in groupby(calls, lambda call: isinstance(call, PreparedCall))
    ]
    return [call for of_c, some in groups for call in ([_replay(some)] if of_c else some)]


def _replay(calls: list[Any]) -> PreparedCall:
    addresses = torch.tensor([call.addresses for call in calls])
    return PreparedCall("fw_replay", abi.Replay(len(calls), addresses), kept=calls)


def _no_memory(name: str) -> MemoryError:
    return MemoryError(
        f"{name}: no memory was left for a kernel's working space; read fewer sequences or"
        " tokens at a time, or set fewer threads by torch.set_num_threads"
    )


def ask(name: str, *structures: Any) -> int:
    """What the C function `name` returns of these structures; 0 in a rehearsal."""
    if rehearsed():
        return 0
    return getattr(_require_library(), name)(b"".join(map(pack, structures)))


def _require_library() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "the kernels refuse every record where the extension is missing"
    return loaded


def threads(elements: int) -> int:
    """Threads worth using for a computation that touches `elements` numbers of state."""
    return 1 if elements < 1 << 16 else torch.get_num_threads()
