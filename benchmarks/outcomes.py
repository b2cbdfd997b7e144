"""The outcomes of claims in benchmarks/results/reproduce, from which docs/reproduce.md is written.

    python benchmarks/outcomes.py --take RUNS
    python benchmarks/outcomes.py [CLAIM ...] [--floors]

The first copies outcome.json of every folder in RUNS, in which ``fastweights reproduce CLAIM --out
RUNS/CLAIM`` was run, and the dates of their commits; a protocol that another replaces is added to
results/reproduce_protocols.json by hand, with its verdict and reason. The second is for a change
of what claims say or of how they are judged: statements, verdicts and reasons are written anew,
what was measured stays. With --floors floors are measured again, too; for those of language models
some are trained, once for all claims: half a minute each on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastweights.lab.reproduce import CLAIMS, Measure, Measures, Outcome, TrialContext, judge
from fastweights.lab.reproduce.claim import FLOOR
from fastweights.training.loop.files import read_json
from measuring import RESULTS

OUTCOMES = RESULTS / "reproduce"
PROTOCOLS = RESULTS / "reproduce_protocols.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("claims", nargs="*", help="names of claims (default: all)")
    parser.add_argument("--take", type=Path, help="folder of runs whose outcomes are copied")
    parser.add_argument("--floors", action="store_true", help="measure floors again")
    parser.add_argument("--data", type=Path, help="the folder with the data of some claims")
    parser.add_argument("--shared", type=Path, default=Path("runs/reproduce/shared"))
    chosen = parser.parse_args()
    if chosen.take is not None:
        taken = [read_json(path) for path in sorted(chosen.take.glob("*/outcome.json"))]
        for outcome in taken:
            save(outcome)
        _date(commit for outcome in taken for commit in (outcome["commit"] or "").split(", "))
        return
    context = TrialContext(chosen.shared, torch.device("cpu"), chosen.data, 1)
    for path in sorted(OUTCOMES.glob("*.json")):
        content: dict[str, Any] = read_json(path)
        if chosen.claims and content["claim"] not in chosen.claims:
            continue
        judged = {**content, **_judged(content, context, chosen.floors)}
        save(judged)
        print(path.stem, content["verdict"], "→", judged["verdict"])


def save(outcome: Mapping[str, Any]) -> None:
    """Write the outcome of a claim where the pages find it, as CLAIM-SIZE.json."""
    (OUTCOMES / f"{outcome['claim']}-{outcome['size']}.json").write_text(
        json.dumps(outcome, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


def _date(commits: Iterable[str]) -> None:
    """Write down the dates of commits, by which their protocols were fixed."""
    protocols = read_json(PROTOCOLS)
    for commit in filter(None, commits):
        asked = ["git", "log", "-1", "--format=%as", commit.rstrip("+")]
        date = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        protocols["commits"][commit] = date
    text = json.dumps(protocols, ensure_ascii=False, indent=1) + "\n"
    PROTOCOLS.write_text(text, encoding="utf-8")


def _judged(content: dict[str, Any], context: TrialContext, floors: bool) -> dict[str, Any]:
    """Verdicts, reasons and floors of what was measured."""
    name, size, claim = content["claim"], content["size"], CLAIMS[content["claim"]]
    experiment = claim.sizes[size].experiment
    measures = Measures(Measure(**row) for row in content["measures"])
    if floors:
        measured = [row for row in measures if row.quantity != FLOOR]
        measures = Measures([*measured, *experiment.floors(context)])
    checks = judge(claim, experiment, measures)
    outcome = Outcome(
        name, claim, size, measures, checks, content["minutes"], content["trials"], commits=()
    )
    new = outcome.content(context.device)
    kept = ("place", "statement", "figures", "verdict", "tally", "checks", "measures")
    return {key: new[key] for key in kept}


if __name__ == "__main__":
    main()
