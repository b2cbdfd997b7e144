"""What was measured on what: the machine, the versions, and the ceilings of the one and the
other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from fastweights.environment import commit as commit
from fastweights.environment import cpu_name
from fastweights.kernels import numerics
from fastweights.kernels.gemm import ACCURATE, onednn_error, precision
from fastweights.lab.bench.timing import Budget, Times, clock_of, time_in_turn

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "flash-linear-attention",
    "mamba-ssm",
    "xlstm",
    "numpy",
    "onnx",
    "onnxruntime",
    "torchao",
    "vllm",
)


@dataclass(frozen=True)
class Machine:
    """The machine that a benchmark ran on.

    Attributes:
        float32_products, compiled_extension, page_pool: The settings in `kernels.numerics`.
    """

    cpu: str
    cores: int
    threads: int
    device: str
    system: str
    float32_products: str
    compiled_extension: bool
    page_pool: bool

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(
            cpu_name(),
            os.cpu_count() or 1,
            torch.get_num_threads(),
            name,
            platform.platform(),
            **numerics(),  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Ceilings:
    """The rates that a machine reaches: FLOP/s of square matrix products, bytes/s (read + written)
    of a copy.

    Attributes:
        fp32_onednn: The same through oneDNN, on a CPU where that is as accurate.
        tf32: The rate of tf32 products, on a GPU.
    """

    fp32: float
    fp32_onednn: float | None
    tf32: float | None
    bf16: float
    bandwidth: float

    def gemm(self, dtype: torch.dtype) -> float:
        """Return the best rate at the accuracy of `dtype`; tf32 is less accurate than fp32."""
        return (
            self.bf16
            if dtype in (torch.bfloat16, torch.float16)
            else max(self.fp32, self.fp32_onednn or 0.0)
        )

    @classmethod
    def measure_now(cls, device: torch.device, *, quick: bool) -> Ceilings:
        """Measure the ceilings; `quick` uses smaller matrices and a smaller copy."""
        size = 256 if quick else 8192 if device.type == "cuda" else 1536
        return cls(
            fp32=_gemm_rate(device, size, torch.float32),
            fp32_onednn=_onednn_rate(device, size),
            tf32=_tf32_rate(device, size),
            bf16=_gemm_rate(device, size, torch.bfloat16),
            bandwidth=_copy_rate(device, 1 << (24 if quick else 28)),
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that benchmarks involve, where
    installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def _rate(device: torch.device, work: float, function: Callable[[], object]) -> float:
    times = time_in_turn({"it": function}, clock_of(device), Budget(seconds=1.0, runs=9))["it"]
    assert isinstance(times, Times), times.reason
    return work / times.low


def _gemm_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _rate(device, 2.0 * size**3, lambda: torch.mm(a, b, out=out))


def _copy_rate(device: torch.device, size: int) -> float:
    a = torch.ones(size, dtype=torch.uint8, device=device)
    out = torch.empty_like(a)
    return _rate(device, 2.0 * size, lambda: out.copy_(a))


def _onednn_rate(device: torch.device, size: int) -> float | None:
    if device.type != "cpu":
        return None
    error = onednn_error()
    if error is None or error > ACCURATE:
        return None
    with precision(torch.backends.mkldnn.matmul, "bf16"):  # pyrefly: ignore[missing-attribute]
        return _gemm_rate(device, size, torch.float32)


def _tf32_rate(device: torch.device, size: int) -> float | None:
    if device.type != "cuda":
        return None
    with precision(torch.backends.cuda.matmul, "tf32"):
        return _gemm_rate(device, size, torch.float32)
