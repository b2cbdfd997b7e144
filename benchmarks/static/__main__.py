"""Compile and count all problems on all GPUs: ``python -m static`` in benchmarks/.

Writes results/static.json, from which docs/gpu-static.md is rendered. It needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

from fastweights.lab.bench.problems import PROBLEMS
from fastweights.lab.bench.report import open_report
from static.gpus import GPUS, Gpu
from static.measure import measure
from static.rows import rows_of

OUT = Path(__file__).parents[1] / "results" / "static.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of problems")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file; default: %(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: all cores")
    chosen = parser.parse_args()
    gpus = {name: rates_of(gpu) for name, gpu in GPUS.items()}
    report = open_report("static", chosen.out, {"gpus": gpus}, listener=lambda row: None)
    wanted = [p for p in PROBLEMS if any(fnmatch(str(p), only) for only in chosen.only)]
    left = [problem for problem in wanted if not report.has(str(problem))]
    for problem, programs, works in measure(left, chosen.processes):
        found = zip(GPUS, programs, works, strict=True)
        report.add(str(problem), [row for one in found for row in rows_of(problem, *one)])
        sys.stderr.write(f"{problem}: {programs[0].kernel}\n")


def rates_of(gpu: Gpu) -> dict[str, float]:
    """The rates that floors are computed from."""
    names = ("bandwidth", "half_products", "tf32_products", "special", "issue")
    return {name: getattr(gpu, name) for name in names}


if __name__ == "__main__":
    main()
