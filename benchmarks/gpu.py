"""Benchmark this library on one NVIDIA GPU: ``PYTHONPATH=src python benchmarks/gpu.py --out
gpu.json``.

Needs torch and transformers. Rows are on the disk as they come; the same command goes on where it
was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

if find_spec("jaxtyping") is None:

    class _Annotations(ModuleType):
        """Stands in for jaxtyping, which only annotates: `Float[Tensor, "b t d"]` is Tensor."""

        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__class_getitem__": classmethod(lambda _, item: item[0])})

    sys.modules["jaxtyping"] = _Annotations("jaxtyping")

import torch

from fastweights.lab.bench.gpu import GpuPlan, run_gpu
from fastweights.lab.bench.targets import open_report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument(
        "--seconds", type=float, default=GpuPlan.seconds, help="default: %(default)s"
    )
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("benchmarks/gpu.py: this needs an NVIDIA GPU, and torch sees none\n")
        return 2
    device = torch.device("cuda")
    settings = {"seconds": chosen.seconds}
    report = open_report("gpu", chosen.out, settings, device, _show, quick=False)
    run_gpu(report, GpuPlan(seconds=chosen.seconds), device)
    return 0


def _show(row: dict) -> None:
    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
