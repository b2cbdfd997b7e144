"""The tests marked `gpu`, each a row as soon as it is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from fastweights.lab.bench.day import outcomes
from fastweights.lab.bench.day.plan import DayPlan
from fastweights.lab.bench.day.rows import OutcomeRow

TEST_SECONDS = 90
"""Of one test, where pytest-timeout is installed."""

EMPTY = 5
"""pytest's status where it has found no test."""


def run_tests(plan: DayPlan, passed: Sequence[str], without: Sequence[str]) -> Iterator[OutcomeRow]:
    """Run the tests that have not `passed` yet, but for those of the cases in `without`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as left_out:
        json.dump({"tests": list(passed), "cases": list(without)}, left_out)
        left_out.flush()
        receiver, sender = os.pipe()
        options = ["--leave-out", left_out.name, "--outcomes", str(sender)]
        with _pytest(plan, options, sender) as process, os.fdopen(receiver) as lines:
            for line in lines:
                yield OutcomeRow(**json.loads(line))
    if process.returncode not in (0, 1, EMPTY):
        raise RuntimeError(f"pytest ended with status {process.returncode}: see the log")


@contextmanager
def _pytest(plan: DayPlan, options: list[str], sender: int) -> Iterator[subprocess.Popen[bytes]]:
    """The tests' process, which writes to `sender`."""
    command = [sys.executable, "-m", "pytest", "-p", outcomes.__name__, *plan.tests]
    command += [*_settings(plan), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, pass_fds=[sender], env=environment) as process:
        os.close(sender)
        yield process


def _settings(plan: DayPlan) -> list[str]:
    """What of pytest's plugins is there."""
    found = ["-m", "gpu", "-q", "--tb=short", "--place", plan.device, "-p", "no:benchmark"]
    if find_spec("xdist") and plan.workers > 1:
        found += ["-n", str(plan.workers), "--dist", "worksteal"]
    if find_spec("pytest_timeout"):
        found += ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    return found
