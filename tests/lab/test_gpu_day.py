"""A session on a GPU, rehearsed with the CPU in its place: nothing that hangs, crashes or is killed
costs another its result.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from day_work import fail, four, lose_the_context, needs_a_context, say, say_and, segfault
from fastweights.lab.bench.day import outcomes, stages, suite
from fastweights.lab.bench.day.findings import Findings
from fastweights.lab.bench.day.jobs import Job, RowGroup, Sitting, run_jobs
from fastweights.lab.bench.day.plan import FAMILIES, GOALS, MODELS, SUITE, DayPlan, family_of
from fastweights.lab.bench.day.rows import EndRow, TimeRow, fault
from fastweights.lab.bench.day.stages import Together, run_stage
from fastweights.lab.bench.day.summary import LINES, summarize
from fastweights.lab.bench.day.tools import run_once, sanitize
from fastweights.lab.bench.report import Header, Report
from fastweights.lab.bench.timing import Times

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
REHEARSAL = DayPlan.rehearsal()


def ledger(tmp_path: Path) -> Findings:
    return Findings(Report.open(tmp_path / "r.json", Header("t", None, {}, {}, {}), dict))


def run(
    jobs, ledger: Findings, tmp_path: Path, *, at_once: int = 2, seconds: float = 600.0
) -> None:
    end = time.monotonic() + seconds
    run_jobs(jobs, at_once, Sitting(ledger.post, end, 60.0, tmp_path / "log"))


BROKEN = {
    "hangs": (partial(time.sleep, 60), "no answer in 1 s"),
    "exits": (partial(os._exit, 9), "the process ended with status 9"),
    "exits well": (partial(os._exit, 0), "the process ended with status 0"),
    "crashes": (segfault, "the process ended with SIGSEGV"),
    "raises": (partial(fail, "too large\nby far"), "RuntimeError: too large"),
}


def test_what_hangs_or_crashes_costs_its_own_group_only(tmp_path):
    """What it has said before is kept, and the tasks after it run."""
    tasks = [
        task
        for name, (end, _) in BROKEN.items()
        for task in (
            RowGroup(name, partial(say_and, name, end), 1 / 60),
            RowGroup(f"after {name}", partial(say, name)),
        )
    ]
    found = ledger(tmp_path)
    whole = Job("whole", (RowGroup("whole", partial(say, "whole")),))
    run([Job("broken", tuple(tasks)), whole], found, tmp_path)
    assert found.faults() == {name: reason for name, (_, reason) in BROKEN.items()}
    assert found.done() == {"whole", *(f"after {name}" for name in BROKEN)}
    said = {row["group"] for row in found.rows if row["type"] == "FiguresRow"}
    assert said == {"whole", *BROKEN, *(f"after {name}" for name in BROKEN)}


def test_a_lost_context_is_replaced(tmp_path):
    found = ledger(tmp_path)
    job = Job("one", (RowGroup("loses", lose_the_context), RowGroup("needs", needs_a_context)))
    run([job], found, tmp_path)
    assert found.done() == {"needs"}
    assert "illegal memory access" in found.faults()["loses"]


def test_the_time_is_up_inside_of_a_task(tmp_path):
    found = ledger(tmp_path)
    start = time.monotonic()
    slow = partial(say_and, "slow", partial(time.sleep, 60))
    tasks = (RowGroup("slow", slow), RowGroup("never", partial(say, "x")))
    run([Job("one", tasks)], found, tmp_path, seconds=4.0)
    assert time.monotonic() - start < 30
    assert found.faults() == {"slow": "the time was up"}
    assert "never" not in found.ends()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents on Linux")
def test_a_killed_session_leaves_no_process_and_goes_on(tmp_path):
    """The same command: what was done is kept as it is; what had failed is tried again, last."""
    code = (
        "import pathlib, sys; from day_work import DayPlan, four\n"
        "from fastweights.lab.bench.day.stages import run_stage\n"
        "run_stage(four, DayPlan.rehearsal(), pathlib.Path(sys.argv[1]))"
    )
    command, path = [sys.executable, "-c", code, str(tmp_path)], tmp_path / "four.json"
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as killed:
        until(lambda: path.exists() and '"pid"' in path.read_text())
        killed.send_signal(signal.SIGKILL)
    before = json.loads(path.read_text())["rows"]
    (hung,) = (row["figures"]["pid"] for row in before if row["group"] == "hung")
    until(lambda: gone(int(hung)))
    assert [row["group"] for row in before if row["type"] == "EndRow"] == ["done", "failed"]
    (tmp_path / "mended").touch()
    after = run_stage(four, REHEARSAL, tmp_path)
    assert after.report.rows[: len(before)] == before
    assert after.done() == {"done", "failed", "hung", "last"}
    order = [row["group"] for row in after.report.rows[len(before) :] if row["type"] == "EndRow"]
    assert order == ["hung", "last", "failed"]


def until(holds, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.slow
def test_every_stage_of_one_case(tmp_path, monkeypatch):
    """In files as few as come back from the machine; a second call has nothing to do."""
    monkeypatch.setitem(FAMILIES, "layers", ("RMSNorm",))
    without = {*FAMILIES, SUITE, MODELS} - {"layers"}
    for stage, kinds in (
        (stages.correct, {"WarmRow", "CheckRow", "RepeatRow"}),
        (times_of_compiled, {"TimeRow"}),
        (stages.decide, set()),
    ):
        found = run_stage(stage, REHEARSAL, tmp_path, without)
        assert not found.faults()
        assert not found.left()
        assert {row["type"] for row in found.rows} == {*kinds, "EndRow", "MachineRow", "Ceilings"}
    again = run_stage(stages.decide, REHEARSAL, tmp_path, without)
    assert len(again.report.rows) == len(found.rows) + 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"correct.json", "times_of_compiled.json", "decide.json", stages.LOG}


def times_of_compiled(plan: DayPlan, found: Findings) -> Iterator[Together]:
    """The stage `times` but for its second phase, which compiles."""
    return (phase for place, phase in enumerate(stages.times(plan, found)) if place != 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", stages.STAGES)
def test_every_stage(tmp_path, stage):
    """Whole; NVIDIA's tools are not there, and a test file stands for those that need a GPU."""
    plan = replace(REHEARSAL, seconds=3000, tests=(str(write_tests(tmp_path)),), workers=2)
    found = run_stage(stages.STAGES[stage], plan, tmp_path / "out")
    assert found.faults().keys() == ({"tests"} if stage == "correct" else set())
    assert not found.left()
    text = summarize(stage, found, plan)
    assert text.count("\n") <= LINES
    assert "not run" in text


def write_tests(folder: Path) -> Path:
    """A file of tests that pass, fail, and take their worker with them."""
    path = folder / "test_small.py"
    path.write_text(
        "import os, pathlib, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "@pytest.mark.parametrize('case', ['decay tied', 'decay scalar'])\n"
        "def test_case(case): pass\n"
        "def test_fails():\n"
        "    assert (pathlib.Path(__file__).parent / 'mended').exists(), 'not yet'\n"
        "def test_crashes():\n"
        "    if not (pathlib.Path(__file__).parent / 'mended').exists(): os._exit(9)\n"
    )
    return path


def test_variants_reach_what_they_vary():
    pytest.importorskip("triton")
    from fastweights.kernels.triton import chunks
    from fastweights.lab.bench.day.variants import VARIANTS

    heads: Any = SimpleNamespace(keys=128, values=128)
    found = []
    for name, vary in VARIANTS.items():
        with vary():
            if name.startswith("states"):
                found.append(chunks.state_tiles(heads))
    assert len(set(found)) == 3


@pytest.mark.slow
def test_tests_are_rows_and_those_that_passed_are_not_run_again(tmp_path):
    """Also where pytest has no configuration of ours: the file lies elsewhere."""
    plan = replace(REHEARSAL, tests=(str(write_tests(tmp_path)),), workers=2)
    rows = list(suite.run_tests(plan, [], ["decay scalar"]))
    found = {row.test.partition("::")[2]: row for row in rows}
    assert {name: row.outcome for name, row in found.items()} == {
        "test_case[decay tied]": "passed",
        "test_fails": "failed",
        "test_crashes": "failed",
    }
    assert "not yet" in found["test_fails"].note
    assert "crashed" in found["test_crashes"].note
    (tmp_path / "mended").touch()
    passed = [row.test for row in rows if row.outcome == "passed"]
    again = list(suite.run_tests(replace(plan, workers=1), passed, []))
    assert {row.test.partition("::")[2]: row.outcome for row in again} == {
        "test_case[decay scalar]": "passed",
        "test_fails": "passed",
        "test_crashes": "passed",
    }


def test_another_device_stands_for_the_gpu():
    """Where a test asks for the fixture `cuda`; all others are made as they are."""
    request = SimpleNamespace(config=SimpleNamespace(getoption=lambda _: "cpu"))
    asked = SimpleNamespace(argname="cuda", cached_result=None, cache_key=lambda _: None)
    device = outcomes.pytest_fixture_setup(asked, request)
    assert device == torch.device("cpu")
    assert outcomes.pytest_fixture_setup(SimpleNamespace(argname="tmp_path"), request) is None


def test_a_tool_that_finds_something_is_a_fault(tmp_path, monkeypatch):
    """By stand-ins for NVIDIA's: one looks at what it is given, one has found something in it."""
    tool = tmp_path / "compute-sanitizer"
    problem = REHEARSAL.problem("RMSNorm", REHEARSAL.tiny)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    notes = []
    looks = "shift 4; \"$1\" -c \"compile(__import__('sys').argv[1], '', 'exec')\" \"$3\""
    for script in (looks, "echo '========= ERROR SUMMARY: 3 errors'; exit 9"):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        (row,) = sanitize(problem, "memcheck", REHEARSAL)
        notes.append(row.note)
    assert notes == ["", "memcheck ends with status 9: ========= ERROR SUMMARY: 3 errors"]
    run_once("RMSNorm", "cpu", *map(str, problem.sizes))


def test_rows_that_are_no_success():
    check = {"group": "g", "type": "CheckRow", "op": "decay none", "dtype": "float32", "note": ""}
    check |= {"error": 1e-6, "gradient_error": 1e-6, "syncs": 0, "auto": True}
    assert fault(check) == ""
    nan = float("nan")
    for wrong in (
        {"error": 1e-3},
        {"gradient_error": nan},
        {"note": "no"},
        {"syncs": 1},
        {"error": None, "gradient_error": None},
    ):
        assert fault(check | wrong), wrong
    assert fault(check | {"dtype": "bfloat16", "error": 1e-2}) == ""
    time_row = {"group": "g", "type": "TimeRow", "note": "RuntimeError: no"}
    assert fault(time_row | {"library": "fastweights"}) == "RuntimeError: no"
    assert fault(time_row | {"library": "flash-linear-attention"}) == ""
    assert fault({"group": "g", "type": "OutcomeRow", "outcome": "failed", "note": ""}) == "failed"
    assert (
        fault({"group": "g", "type": "OutcomeRow", "outcome": "skipped", "note": "no reason"}) == ""
    )
    assert fault({"group": "g", "type": "RepeatRow", "differs": ["o"]})


def timed(op: str, library: str, median: float, phase: str = "forward", **facts) -> TimeRow:
    plan = DayPlan()
    sizes = facts.pop("sizes", plan.problem(op, plan.main).sizes)
    facts = {"seconds": Times(median, median, median, 5), "dtype": "bfloat16", **facts}
    names = {"contender": library, "library": library}
    return TimeRow(op=op, sizes=sizes, phase=phase, round=0, **names, **facts)


def test_goals_are_held_beside_what_was_found(tmp_path):
    found, plan, fla = ledger(tmp_path), DayPlan(), "flash-linear-attention"
    found.post("a", timed("decay tied", "fastweights", 1e-3))
    found.post("a", timed("decay tied", fla, 3e-3))
    found.post("a", timed("decay tied", "fastweights", 1e-4, sizes=plan.small, host=5e-5))
    found.post("a", timed("decay tied", fla, 3e-4, sizes=plan.small))
    found.post("b", timed("decay scalar", "fastweights", 1e-3, "backward"))
    found.post("b", timed("decay scalar", fla, 2e-3, "backward", wrong=True))
    found.post("c", timed("scan real", "fastweights", 1e-3, bandwidth=0.9))
    found.post("d", replace(timed("delta scalar", "fastweights", 1e-3), seconds=None, note="no"))
    found.expect(["a", "b", "c", "d", "e"])
    found.post("a", EndRow(1.0))
    found.without = frozenset({"gla"})
    lines = summarize("times", found, plan).splitlines()
    said = {line for line in lines if line.startswith(("met", "NOT MET", "not run"))}
    assert "NOT MET decay tied b8 t4096 h16 k128 v128 forward 3.5× fla: 3.00× (1 ms, fla 3)" in said
    assert "met     decay tied b8 t512 h4 k64 v64 forward 2× fla: 3.00× (0.1 ms, fla 0.3)" in said
    assert any(
        line.startswith("met     decay scalar") and "fla's results are wrong" in line
        for line in said
    )
    assert "met     scan forward at 80% of a copy's rate: 90%" in said
    assert any(
        "delta scalar b8 t4096 h16 k128 v128 forward 1.5× fla: no time of ours: no" in line
        for line in said
    )
    assert any("decay vector gentle" in line and "left out" in line for line in said)
    assert "failed  d: no" in lines
    assert any(line.startswith("no time was left for: b, c, d, e") for line in lines)
    assert len(lines) <= LINES


def test_no_more_than_forty_lines(tmp_path):
    found = ledger(tmp_path)
    for n in range(100):
        found.post(f"group {n}", EndRow(1.0, "it failed\nin two lines"))
    lines = summarize("times", found, DayPlan()).splitlines()
    assert len(lines) == LINES
    assert any("lines more: see times.json" in line for line in lines)


def test_every_case_has_a_family_and_every_goal_comes_first():
    from fastweights.lab.bench.cases import CASES

    assert {family_of(case.name) for case in CASES} == FAMILIES.keys()
    first = [problem.name for problem in DayPlan().timed()]
    assert tuple(first[: len(GOALS)]) == GOALS
    assert set(first) == {case.name for case in CASES} - {"mesa"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "benchmarks" / "gpu_day.py"))["main"]
    assert main(["times", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs an NVIDIA GPU" in said
    assert not list(tmp_path.glob("*.json"))
