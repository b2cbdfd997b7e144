"""float32 matrix products on the CPU through oneDNN, inside our kernels, where it is as accurate
and faster.

torch sends them to MKL, which runs at half its speed on other makers' processors. What torch calls
bfloat16 precision sends them to oneDNN, which still computes in float32 where the processor has no
matrix unit for bfloat16, and rounds where it has one. So a probe asks both questions once per
process, and answers no in doubt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

ACCURATE = 1e-6
FASTER = 1.3

P = ParamSpec("P")
R = TypeVar("R")


class GemmProbe(NamedTuple):
    """What the probe found: oneDNN's relative error and its speed in units of torch's own way; None
    without oneDNN.
    """

    error: float | None
    speed: float

    @property
    def use_onednn(self) -> bool:
        return self.error is not None and self.error < ACCURATE and self.speed > FASTER

    @property
    def library(self) -> str:
        return "oneDNN" if self.use_onednn else "torch's own"

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.library}: there is no oneDNN"
        if self.error >= ACCURATE:
            return f"{self.library}: oneDNN rounds them (error {self.error:.0e})"
        return (
            f"{self.library}: oneDNN has {self.speed:.2f} times torch's speed, error"
            f" {self.error:.0e}"
        )


@cache
def probe_gemm() -> GemmProbe:
    """The probe's, on matrices of the size that the blocked kernels multiply."""
    if not torch.backends.mkldnn.is_available():
        return GemmProbe(None, 0.0)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 64, 64, generator=generator) for _ in range(2))
    exact, own, other = a.double() @ b.double(), [], []
    with precision(_backend(), "bf16"):
        error = ((product(a, b) - exact).norm() / exact.norm()).item()
    for _ in range(7):
        own.append(_seconds(a, b))
        with precision(_backend(), "bf16"):
            other.append(_seconds(a, b))
    return GemmProbe(error, min(own) / min(other))


def product(a: Tensor, b: Tensor) -> Tensor:
    """What the probe looks at."""
    return a @ b


def _seconds(a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    product(a, b)
    return time.perf_counter() - start


def _backend() -> Any:
    return torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def precision(backend: Any, name: str) -> Iterator[None]:
    """fp32 products of a torch backend in the precision called `name`, inside the block."""
    before = backend.fp32_precision
    backend.fp32_precision = name
    try:
        yield
    finally:
        backend.fp32_precision = before


class _OneDNNSwitch:
    """The switch is the process's: the first thread to come in turns it, the last to leave turns it
    back.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, ""

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before, _backend().fp32_precision = _backend().fp32_precision, "bf16"
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                _backend().fp32_precision = self.before


_ONEDNN_SWITCH = _OneDNNSwitch()


def with_onednn_gemm(kernel: Callable[P, R]) -> Callable[P, R]:
    """`kernel` with its float32 products on the CPU by whichever library the probe chose; compiled
    graphs choose for themselves.
    """

    @wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not _single(args) or not probe_gemm().use_onednn:
            return kernel(*args, **kwargs)
        with _ONEDNN_SWITCH:
            return kernel(*args, **kwargs)

    return run


def _single(args: tuple[object, ...]) -> bool:
    """Whether the tensors are float32 on the CPU, by the last one: a kernel's state, or its
    gradient.
    """
    last = next((x for x in reversed(args) if isinstance(x, Tensor)), None)
    return last is not None and last.dtype == torch.float32 and last.device.type == "cpu"
