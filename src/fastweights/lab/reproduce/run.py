"""The test of a claim: its trials, each of them run once, the verdict and the picture."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fastweights.lab.bench.machine import Machine, commit, versions
from fastweights.lab.reproduce.claim import Claim, ClaimVerdict, Experiment, Trial, TrialContext
from fastweights.lab.reproduce.judge import Check, judge, verdict_of
from fastweights.lab.reproduce.measures import Measure, Measures
from fastweights.training.loop.files import write_figure, write_json
from fastweights.training.loop.identity import differences, key_of, to_record
from fastweights.training.loop.json_lines import append_row, cut_torn_line, read_rows


@dataclass(frozen=True)
class TrialRecord:
    """The record of a trial that was run: the trial (`training.loop.identity`) and its key, the
    minutes that it took, the commit that ran it, if known, and its numbers."""

    trial: Mapping[str, Any]
    name: str
    minutes: float
    commit: str | None
    measures: tuple[Measure, ...]
    key: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read a record from a line of the ledger."""
        fields: dict[str, Any] = {**row, "measures": tuple(Measure(**m) for m in row["measures"])}
        return cls(**fields)


class Ledger:
    """The records of all trials run in a folder: one line of JSON each, only ever appended to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trials.jsonl"
        cut_torn_line(self.path)
        self.done = {done.key: done for done in map(TrialRecord.of, read_rows(self.path))}

    def find(self, trial: Trial) -> TrialRecord | None:
        """Return the record of the trial; None if it was not run."""
        done = self.done.get(key_of(trial))
        return None if done is None or any(differences(done.trial, trial)) else done

    def add(self, done: TrialRecord) -> None:
        """Append a record and sync the file to disk."""
        append_row(self.path, asdict(done))
        self.done[done.key] = done


@dataclass(frozen=True)
class Outcome:
    """The outcome of testing a claim at one size.

    Attributes:
        name: Name of the claim.
        claim: The claim.
        size: Name of the size.
        measures: The numbers by which it was judged.
        checks: The results of its statements.
        minutes: Minutes of all trials together.
        trials: Number of trials.
        commits: The commits that ran the trials, where they are known; one, unless a test was
            stopped and went on with other code.
    """

    name: str
    claim: Claim
    size: str
    measures: Measures
    checks: tuple[Check, ...]
    minutes: float
    trials: int
    commits: tuple[str, ...]

    @property
    def verdict(self) -> ClaimVerdict:
        """The verdict on the claim, of those on its parts; it is not tested at a size that says
        little of the paper's experiment."""
        if self.claim.sizes[self.size].little:
            return ClaimVerdict.UNTESTED
        return verdict_of(self.checks)

    @property
    def tally(self) -> dict[str, int]:
        """The number of the claim's parts with each verdict."""
        return dict(Counter(check.verdict.value for check in self.checks))

    def content(self, device: torch.device) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        claim = self.claim
        return {
            "claim": self.name,
            "paper": claim.paper,
            "place": claim.place,
            "statement": claim.statement,
            "size": self.size,
            "experiment": key_of(claim.sizes[self.size].experiment),
            "changes": dict(claim.sizes[self.size].changes),
            "updates": dict(claim.sizes[self.size].experiment.updates),
            "unit": claim.unit,
            "figures": claim.figures,
            "verdict": self.verdict.value,
            "tally": self.tally,
            "checks": [_check(check) for check in self.checks],
            "minutes": round(self.minutes, 2),
            "trials": self.trials,
            "commit": ", ".join(self.commits) or None,
            "machine": asdict(Machine.here(device)),
            "versions": versions(),
            "measures": [asdict(row) for row in self.measures],
        }


Listener = Callable[[Trial, int, int], None]
"""Called before a trial that is not done yet, with its number and how many there are."""


def reproduce(
    name: str,
    claim: Claim,
    size: str,
    out: Path,
    place: TrialContext,
    listener: Listener = lambda trial, number, count: None,
) -> Outcome:
    """Test a claim at one of its sizes in the folder `out`; trials that were run there are not
    repeated.

    out/trials.jsonl has every trial's numbers, out/outcome.json the verdict and what it rests on,
    out/picture.png the picture.

    Args:
        name: Name of the claim.
        claim: The claim.
        size: Name of the size.
        out: The folder.
        place: What all trials share.
        listener: Called with (trial, its number, number of trials) for every trial.

    Raises:
        ValueError: If the claim has no such size, a file that it reads is missing, or several
            processes cannot train its models.
    """
    experiment = claim.at(size).experiment
    if place.processes.count > 1 and not experiment.trains_together:
        raise ValueError(
            f"{name} trains every model in one process; start it without torchrun, or accelerate"
            " launch"
        )
    done = run_missing_trials(experiment, Ledger(out), place, listener)
    outcome = outcome_of(name, claim, size, done, experiment.floors(place))
    picture = claim.picture.draw(outcome.measures, f"{claim.paper}, {claim.place}")
    write_figure(out / "picture.png", picture)
    write_json(out / "outcome.json", outcome.content(place.device))
    return outcome


def run_missing_trials(
    experiment: Experiment, ledger: Ledger, place: TrialContext, listener: Listener
) -> list[TrialRecord]:
    """Run the trials that the ledger does not have, and return the records of all.

    Before the first of them, the user's files that any of them reads are looked for, and the
    folder is made.

    Raises:
        ValueError: If a file is missing.
    """
    trials = experiment.trials()
    found = [ledger.find(trial) for trial in trials]
    missing = [trial for trial, done in zip(trials, found, strict=True) if done is None]
    for name in dict.fromkeys(name for trial in missing for name in trial.files):
        place.file(name)
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    for number, (trial, done) in enumerate(zip(trials, found, strict=True), 1):
        if done is None:
            listener(trial, number, len(trials))
            found[number - 1] = run_trial(trial, ledger, place)
    return [done for done in found if done is not None]


def run_trial(trial: Trial, ledger: Ledger, place: TrialContext) -> TrialRecord:
    """Run a trial, and append its numbers to the ledger."""
    start = time.perf_counter()
    measures = tuple(trial.run(place))
    minutes = max((time.perf_counter() - start) / 60, trial.minutes(place))
    done = TrialRecord(to_record(trial), trial.name, minutes, commit(), measures, key_of(trial))
    ledger.add(done)
    return done


def outcome_of(
    name: str, claim: Claim, size: str, done: Sequence[TrialRecord], floors: Iterable[Measure]
) -> Outcome:
    """Return the verdict on trials that were run, beside the floors of their quantity."""
    experiment = claim.sizes[size].experiment
    rows = [row for one in done for row in one.measures]
    measures = experiment.summary(Measures([*rows, *floors]))
    checks = judge(claim, experiment, measures)
    minutes = sum(one.minutes for one in done)
    commits = tuple(dict.fromkeys(one.commit for one in done if one.commit is not None))
    return Outcome(name, claim, size, measures, checks, minutes, len(done), commits)


def _check(check: Check) -> dict[str, Any]:
    low, middle, high = (
        _finite(x) for x in (check.difference.low, check.difference.middle, check.difference.high)
    )
    return {
        "sentence": check.sentence,
        "difference": middle,
        "low": low,
        "high": high,
        "visible": _finite(check.difference.visible),
        "verdict": check.verdict.value,
        "reason": check.reason,
    }


def _finite(x: float) -> float | None:
    """JSON has no infinity."""
    return x if abs(x) < float("inf") else None
