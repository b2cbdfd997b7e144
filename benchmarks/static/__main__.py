"""Compile and count all problems on all GPUs: ``python -m static`` in benchmarks/.

Writes results/static.json, from which docs/gpu-static.md is rendered. It needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fastweights.lab.bench.machine import commit, versions
from fastweights.lab.bench.problems import PROBLEMS
from fastweights.training.loop.files import write_json
from static.gpus import GPUS, Gpu
from static.measure import measure
from static.rows import rows_of

OUT = Path(__file__).parents[1] / "results" / "static.json"
FORMAT = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of problems")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file; default: %(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: all cores")
    chosen = parser.parse_args()
    problems = [p for p in PROBLEMS if any(fnmatch(str(p), only) for only in chosen.only)]
    content: dict[str, Any] = {
        "format": FORMAT,
        "commit": commit(),
        "machine": platform.machine(),
        "versions": versions(),
        "gpus": {name: rates_of(gpu) for name, gpu in GPUS.items()},
        "rows": [],
    }
    for problem, programs, works in measure(problems, chosen.processes):
        for gpu, program, work in zip(GPUS, programs, works, strict=True):
            rows = rows_of(problem, gpu, program, work)
            content["rows"] += [{"type": type(row).__name__, **asdict(row)} for row in rows]
        sys.stderr.write(f"{problem}: {programs[0].kernel}\n")
        write_json(chosen.out, content)


def rates_of(gpu: Gpu) -> dict[str, float]:
    """The rates that floors are computed from."""
    names = ("bandwidth", "half_products", "tf32_products", "special", "issue")
    return {name: getattr(gpu, name) for name in names}


if __name__ == "__main__":
    main()
