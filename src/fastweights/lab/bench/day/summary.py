"""What a stage comes to, in forty lines: goals, failures, and what has not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastweights.lab.bench.contenders import Sizes
from fastweights.lab.bench.day.findings import Findings
from fastweights.lab.bench.day.plan import GOALS, DayPlan, family_of
from fastweights.lab.bench.day.rows import Row
from fastweights.lab.bench.day.times import BACKWARD, FORWARD
from fastweights.lab.bench.peers import FLA

LINES, WIDTH = 40, 150
TIMES_FLA = {
    "decay tied": 3.5,
    "decay vector gentle": 2.5,
    "decay scalar": 1.8,
    "delta scalar": 1.5,
}
"""How many times faster than flash-linear-attention, by case, at the sizes of `MAIN`."""

MESA_TIMES_FLA, ENOUGH = 3.0, 1.2
"""The same at equal residual: no step counts whose error is more than so many times the best."""

TIMES_FLA_SMALL = 2.0
"""At the sizes of `SMALL`, where launches take longer than their work."""

HOST = {FORWARD: 80e-6, BACKWARD: 220e-6}
"""Seconds in which a small call returns."""

OF_COPY, OVER_FLOOR, FIRST_CALL = 0.8, 1.3, 3.0
"""Of a scan, the rate of a copy; a model's token over its floor; seconds of a first call."""

ELSEWHERE = (
    "two GPUs (NCCL, FSDP2, torchtitan), vLLM, bitsandbytes, ONNX Runtime for CUDA, a network"
)
"""What no stage can run on one GPU without more packages."""


@dataclass(frozen=True)
class Goal:
    """A goal, and what was found of it: nothing if `met` is None."""

    what: str
    met: bool | None
    found: str

    def __str__(self) -> str:
        word = {True: "met", False: "NOT MET", None: "not run"}[self.met]
        return f"{word:8}{self.what}: {self.found}"


def summarize(name: str, ledger: Findings, plan: DayPlan) -> str:
    """Return the forty lines."""
    goals = {"correct": _of_results, "times": _of_times, "decide": _of_models}[name](ledger, plan)
    faults, left = ledger.faults(), ledger.left()
    head = [f"{name}: {len(ledger.done())} groups done, {len(faults)} failed, {len(left)} not run"]
    end = [f"no stage runs what needs {ELSEWHERE}"]
    if ledger.without:
        end.insert(0, f"left out: {', '.join(sorted(ledger.without))}")
    if left:
        end.insert(0, f"no time was left for: {', '.join(left)}")
    body = [*map(str, goals), *(f"failed  {group}: {why}" for group, why in faults.items())]
    if (room := LINES - len(head) - len(end)) < len(body):
        body = [*body[: room - 1], f"… and {len(body) - room + 1} lines more: see {name}.json"]
    return "\n".join(line.replace("\n", " ")[:WIDTH] for line in (*head, *body, *end)) + "\n"


def _rows(ledger: Findings, kind: str) -> list[Row]:
    return [row for row in ledger.rows if row["type"] == kind]


def _of_results(ledger: Findings, plan: DayPlan) -> Iterator[Goal]:
    machine = _rows(ledger, "MachineRow")[-1]
    missing = ", ".join(ledger.missing()) or "nothing"
    yield Goal(f"the machine ({plan.device})", True, f"{machine['device']}; missing: {missing}")
    yield _all_well(ledger, "no test fails", "tests", "OutcomeRow")
    yield _all_well(ledger, "all agree with float64", "check ", "CheckRow")
    yield _all_well(ledger, "all repeat on poisoned memory", "repeat ", "RepeatRow")
    yield _all_well(ledger, "no wrong access", "memcheck ", "ToolRow")
    yield _all_well(ledger, "no race", "racecheck ", "ToolRow")
    yield from _first_calls(ledger)


def _all_well(ledger: Findings, what: str, begin: str, kind: str) -> Goal:
    """That every group which begins so has ended well."""
    groups = [group for group in ledger.expected if group.startswith(begin)]
    ended, done = (ledger.ends().keys() & set(groups)), ledger.done() & set(groups)
    rows = [row for row in _rows(ledger, kind) if row["group"] in groups]
    found = f"{len(done)} of {len(groups)} groups, {len(rows)} rows" if groups else "nothing to run"
    return Goal(what, len(done) == len(groups) if ended else None, found)


def _first_calls(ledger: Findings) -> Iterator[Goal]:
    warmed = _rows(ledger, "WarmRow")
    if warmed:
        worst = max(warmed, key=lambda row: row["seconds"])
        found = f"{worst['seconds']:.1f} s for the {worst['kernels']} kernels of {worst['op']}"
        yield Goal(f"first calls under {FIRST_CALL:g} s", worst["seconds"] < FIRST_CALL, found)


def _best(ledger: Findings) -> dict[tuple[Any, ...], Row]:
    """By case, sizes, phase and library, the faster of its two rounds."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(_rows(ledger, "TimeRow"), key=_median, reverse=True):
        if row["seconds"]:
            found[row["op"], Sizes(*row["sizes"]), row["phase"], row["library"]] = row
    return found


def _median(row: Row) -> float:
    return row["seconds"]["median"] if row["seconds"] else 0.0


def _of_times(ledger: Findings, plan: DayPlan) -> Iterator[Goal]:
    best = _best(ledger)
    for name, wanted in TIMES_FLA.items():
        for phase in (FORWARD, BACKWARD):
            yield _beside_fla(best, ledger, name, plan.main, phase, wanted)
    yield from _equal_residual(ledger)
    for name in GOALS:
        yield _beside_fla(best, ledger, name, plan.small, FORWARD, TIMES_FLA_SMALL)
        yield from _on_the_host(best, name, plan.small)
    sizes = plan.problem("scan real", plan.main).sizes
    for phase in (FORWARD, BACKWARD):
        row = best.get(("scan real", sizes, phase, "fastweights"))
        what = f"scan {phase} at {OF_COPY:.0%} of a copy's rate"
        found = row["bandwidth"] if row else 0.0
        yield Goal(what, found >= OF_COPY if row else None, f"{found:.0%}" if row else "no time")


def _beside_fla(
    best: dict[tuple[Any, ...], Row],
    ledger: Findings,
    name: str,
    sizes: Sizes,
    phase: str,
    wanted: float,
) -> Goal:
    what = f"{name} {sizes} {phase} {wanted:g}× fla"
    ours, theirs = (best.get((name, sizes, phase, lib)) for lib in ("fastweights", FLA))
    if family_of(name) in ledger.without:
        return Goal(what, None, "left out")
    if ours is None or theirs is None:
        missing = "ours" if ours is None else "fla"
        return Goal(what, None, f"no time of {missing}: {_why(ledger, name, sizes, missing)}")
    ratio = _median(theirs) / _median(ours)
    wrong = " (fla's results are wrong)" if theirs["wrong"] else ""
    found = f"{ratio:.2f}× ({1e3 * _median(ours):.3g} ms, fla {1e3 * _median(theirs):.3g}){wrong}"
    return Goal(what, ratio >= wanted, found)


def _why(ledger: Findings, name: str, sizes: Sizes, who: str) -> str:
    """Why somebody has no time."""
    for row in _rows(ledger, "TimeRow"):
        its = (row["library"] == "fastweights") == (who == "ours") and row["op"] == name
        if its and Sizes(*row["sizes"]) == sizes and row["note"]:
            return row["note"]
    return next((why for group, why in ledger.faults().items() if name in group), "not timed")


def _equal_residual(ledger: Findings) -> Iterator[Goal]:
    """Of both, the fastest that is about as accurate as fla with all its steps."""
    rows = [row for row in _rows(ledger, "ResidualRow") if row["error"] is not None]
    theirs = [row for row in rows if row["library"] == FLA]
    limit = ENOUGH * min((row["error"] for row in theirs), default=0.0)
    for phase in (FORWARD, BACKWARD):
        what = f"mesa {phase} {MESA_TIMES_FLA:g}× fla at equal residual"
        fastest = {
            library: min(
                (r for r in rows if r["library"] == library and r[phase] and r["error"] <= limit),
                key=lambda row: row[phase],
                default=None,
            )
            for library in ("fastweights", FLA)
        }
        ours, fla = fastest["fastweights"], fastest[FLA]
        if ours is None or fla is None:
            yield Goal(what, None, "not timed, or nobody is accurate enough")
        else:
            ratio = fla[phase] / ours[phase]
            found = f"{ratio:.2f}× ({ours['steps']} steps, fla {fla['steps']})"
            yield Goal(what, ratio >= MESA_TIMES_FLA, found)


def _on_the_host(best: dict[tuple[Any, ...], Row], name: str, sizes: Sizes) -> Iterator[Goal]:
    rows = [best.get((name, sizes, phase, "fastweights")) for phase in (FORWARD, BACKWARD)]
    hosts = [row["host"] for row in rows if row and row["host"]]
    if len(hosts) == 2:
        met = hosts[0] <= HOST[FORWARD] and sum(hosts) <= HOST[FORWARD] + HOST[BACKWARD]
        found = f"{1e6 * hosts[0]:.0f} and {1e6 * sum(hosts):.0f} µs"
        yield Goal(f"{name} small returns in 80 µs, with backward 300", met, found)


def _of_models(ledger: Findings, plan: DayPlan) -> Iterator[Goal | str]:
    token = [row for row in _rows(ledger, "StepRow") if row["over_floor"]]
    what = f"a token of {plan.preset} within {OVER_FLOOR:g}× its floor"
    over = token[-1]["over_floor"] if token else 0.0
    yield Goal(what, over <= OVER_FLOOR if token else None, f"{over:.2f}×" if token else "no time")
    figures = {row["group"]: row["figures"] for row in _rows(ledger, "FiguresRow")}
    trained = figures.get("training")
    fell = trained["last_loss"] < trained["first_loss"] if trained else None
    yield Goal("bf16 training lowers the loss", fell, _listed(trained))
    converted = figures.get("linearizing")
    yield Goal("a model is linearized", True if converted else None, _listed(converted))
    for row in _rows(ledger, "VariantRow"):
        if row["ratio"] is not None and row["variant"] != "as is":
            found = f"{row['ratio']:.2f}× the time, results differ by {row['difference']:.1e}"
            yield f"tried   {row['op']} {row['phase']}, {row['variant']}: {found}"


def _listed(figures: dict[str, float] | None) -> str:
    if figures is None:
        return "no result"
    return ", ".join(f"{name} {value:.4g}" for name, value in list(figures.items())[:6])
