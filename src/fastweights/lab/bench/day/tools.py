"""NVIDIA's tools on one operation, where they are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob

from fastweights.lab.bench.contenders import Phase, bind
from fastweights.lab.bench.day.plan import DayPlan, draw
from fastweights.lab.bench.day.rows import ToolRow
from fastweights.lab.bench.problems import Problem

COMPUTE_SANITIZER, NCU = "compute-sanitizer", "ncu"
PLACES = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-compute/*",
    "/usr/local/cuda*/nsight-compute*",
)
COUNTED = {
    "states": "decay scalar",
    "anchor": "decay tied",
    "release": "decay tied",
    "conjugate_gradients": "mesa 30 steps",
    "solve": "delta scalar",
}
"""Kernels whose counters are read, and a case that launches each."""

KEPT = 12_000
"""Characters of a tool's answer, its end."""


def find_tool(name: str) -> str | None:
    """Return the path of one of NVIDIA's tools, or None."""
    home = [os.environ[n] + "/bin" for n in ("CUDA_HOME", "CUDA_PATH") if n in os.environ]
    places = [os.environ.get("PATH", ""), *home, *(p for g in PLACES for p in sorted(glob(g)))]
    return shutil.which(name, path=os.pathsep.join(places))


def run_once(name: str, device: str, *sizes: str) -> None:
    """Run forward and backward of a case once: what a tool looks at."""
    plan = DayPlan.rehearsal() if device == "cpu" else DayPlan()
    problem = plan.problem(name, type(plan.main)(*map(int, sizes)))
    inputs = {n: x.requires_grad_() for n, x in draw(problem, plan.place).items()}
    bind(problem.case.implementations(inputs)[0].load(), inputs, Phase.BOTH)()


def sanitize(problem: Problem, tool: str, plan: DayPlan) -> Iterator[ToolRow]:
    """Look for wrong accesses (memcheck) or races (racecheck) in an operation."""
    options = ["--tool", tool, "--error-exitcode", "9"]
    status, text = _run(COMPUTE_SANITIZER, options, problem, plan)
    errors = re.findall(r"ERROR SUMMARY: (\d+) error|(\d+) hazard", text)
    bad = status != 0 or any(int(a or b) for a, b in errors)
    note = f"{tool} ends with status {status}: {_summary(text)}" if bad else ""
    yield ToolRow(problem.name, tool, "", text[-KEPT:] if bad else "", note)


def count(kernel: str, plan: DayPlan) -> Iterator[ToolRow]:
    """Read one launch's counters."""
    problem = plan.problem(COUNTED[kernel], plan.main)
    options = ["--clock-control", "none", "--launch-count", "1", "--set", "detailed"]
    status, text = _run(NCU, [*options, "--kernel-name", f"regex:^{kernel}"], problem, plan)
    note = f"ncu ends with status {status}: {_summary(text)}" if status else ""
    yield ToolRow(problem.name, NCU, kernel, text[-KEPT:], note)


def _run(tool: str, options: list[str], problem: Problem, plan: DayPlan) -> tuple[int, str]:
    path = find_tool(tool)
    if path is None:
        raise FileNotFoundError(f"{tool} is not on the PATH, nor beside CUDA")
    code = f"from {__name__} import run_once; import sys; run_once(*sys.argv[1:])"
    once = [sys.executable, "-c", code, problem.name, plan.device, *map(str, problem.sizes)]
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [path, *options, *once], capture_output=True, text=True, env={**os.environ, **settings}
    )
    return found.returncode, found.stdout + found.stderr


def _summary(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "SUMMARY" in line or "Error" in line]
    return (said or lines or ["it said nothing"])[-1].strip()
