"""Which library multiplies the float32 matrices of the torch kernels on the CPU.

torch sends them to MKL, which runs at half its speed on AMD's processors. What torch calls bfloat16
precision sends them to oneDNN, which still computes in float32 where the processor has no matrix
unit for bfloat16, and rounds where it has one. `products` chooses; the default follows from the
processor's maker and from whether oneDNN rounds, never from a clock, so that every process on a
machine computes the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastweights.kernels.rehearsal import rehearsed

ACCURATE = 1e-6
"""Relative error up to which a product counts as one in float32."""
LIBRARIES = {"torch": "torch's own", "onednn": "oneDNN"}
"""The routes of float32 products, and what multiplies there."""

P = ParamSpec("P")
R = TypeVar("R")


class products:  # noqa: N801, used as a function, as torch.set_grad_enabled is
    """Send the torch kernels' float32 products on the CPU to one library, from now on.

    As a context manager it does so inside the block alone. The choice is the process's, in all its
    threads.

    Args:
        route: "torch" (what torch takes for all products), "onednn", or None for the default:
            oneDNN on AMD's processors where it does not round, else torch

    Raises:
        ValueError: if there is no such route, or oneDNN is missing or rounds on this processor
    """

    _chosen: str | None = None

    def __init__(self, route: str | None) -> None:
        if route not in (None, *LIBRARIES):
            raise ValueError(f"products({route!r}): use {', '.join(map(repr, LIBRARIES))} or None")
        if route == "onednn" and not _onednn_is_accurate():
            raise ValueError(
                "products('onednn'): oneDNN is missing here or multiplies with a relative error"
                f" above {ACCURATE:.0e} (found {onednn_error()}); use 'torch'"
            )
        self._before, products._chosen = products._chosen, route

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        products._chosen = self._before


def products_route() -> str:
    """The route that float32 products take now: "torch" or "onednn"."""
    return products._chosen or default_route()


@cache
def default_route() -> str:
    """oneDNN on AMD's processors, where MKL is slow, if it does not round; else torch's own."""
    slow = torch.backends.mkl.is_available() and _maker() == "AuthenticAMD"
    return "onednn" if slow and _onednn_is_accurate() else "torch"


@cache
def _maker() -> str | None:
    """Of the processor, as the Linux kernel calls it; None elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((s.partition(":")[2].strip() for s in lines if s.startswith("vendor_id")), None)


@cache
def onednn_error() -> float | None:
    """The relative error of oneDNN's products, the same at every call; None without oneDNN."""
    if not torch.backends.mkldnn.is_available() or _backend() is None:
        return None
    with _disable_current_modes():  # of tensors without numbers, which have no error
        a, b = _matrices()
        exact = a.double() @ b.double()
        with precision(_backend(), "bf16"):
            return ((product(a, b) - exact).norm() / exact.norm()).item()


def _onednn_is_accurate() -> bool:
    error = onednn_error()
    return error is not None and error < ACCURATE


def _matrices() -> list[Tensor]:
    """Two of the size that the blocked kernels multiply."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(128, 64, 64, generator=generator) for _ in range(2)]


class ProductsReport(NamedTuple):
    """What `probe_products` found.

    Attributes:
        route: the one that products take now
        error: oneDNN's relative error; None without oneDNN
        speed: oneDNN's in units of torch's own; None without oneDNN
    """

    route: str
    error: float | None
    speed: float | None

    def __str__(self) -> str:
        taken = LIBRARIES[self.route]
        if self.error is None:
            return f"{taken}: there is no oneDNN"
        if self.error >= ACCURATE:
            return f"{taken}: oneDNN rounds them (error {self.error:.0e})"
        return f"{taken}: oneDNN has {self.speed:.2f} times torch's speed, error {self.error:.0e}"


def probe_products() -> ProductsReport:
    """Measure oneDNN beside torch's own way; nothing is chosen by the result."""
    error, (a, b), own, other = onednn_error(), _matrices(), [], []
    if error is None:
        return ProductsReport(products_route(), None, None)
    for _ in range(7):
        own.append(_seconds(a, b))
        with precision(_backend(), "bf16"):
            other.append(_seconds(a, b))
    return ProductsReport(products_route(), error, min(own) / min(other))


def product(a: Tensor, b: Tensor) -> Tensor:
    """What the probe looks at."""
    return a @ b


def _seconds(a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    product(a, b)
    return time.perf_counter() - start


def _backend() -> Any:
    """oneDNN's setting; torch 2.8 has none."""
    return getattr(torch.backends.mkldnn, "matmul", None)


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
    """torch's switch is the process's: the first thread to come in turns it, the last to leave
    turns it back.
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


def route_products(kernel: Callable[P, R]) -> Callable[P, R]:
    """`kernel` with its float32 products on the CPU by the route that `products` chose; compiled
    graphs choose for themselves.
    """

    @wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or rehearsed() or not _single(args):
            return kernel(*args, **kwargs)
        if products_route() == "torch":
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
