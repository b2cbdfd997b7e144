"""Judge the measured outcomes of claims again: ``python benchmarks/judge_again.py --data FOLDER``.

For a change of how claims are judged: floors, verdicts and reasons in benchmarks/results/reproduce
are written anew, what was measured stays. Language models whose floors are asked for are trained
again, once for all claims: half a minute each on 2 cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fastweights.lab.reproduce import CLAIMS, Measure, Measures, Outcome, TrialContext, judge
from fastweights.lab.reproduce.claim import FLOOR
from fastweights.runs.files import read_json, write_json

RESULTS = Path(__file__).parent / "results" / "reproduce"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder with the data of some claims")
    parser.add_argument("--shared", type=Path, default=Path("runs/reproduce/shared"))
    chosen = parser.parse_args()
    context = TrialContext(chosen.shared, torch.device("cpu"), chosen.data, 1)
    for path in sorted(RESULTS.glob("*.json")):
        content: dict[str, Any] = read_json(path)
        write_json(path, {**content, **_judged(content, context)})
        print(path.stem, content["verdict"], "→", read_json(path)["verdict"])


def _judged(content: dict[str, Any], context: TrialContext) -> dict[str, Any]:
    """Verdicts, reasons and floors of what was measured."""
    name, size, claim = content["claim"], content["size"], CLAIMS[content["claim"]]
    experiment = claim.sizes[size].experiment
    measured = [Measure(**row) for row in content["measures"] if row["quantity"] != FLOOR]
    measures = Measures([*measured, *experiment.floors(context)])
    checks = judge(claim, experiment, measures)
    outcome = Outcome(name, claim, size, measures, checks, content["minutes"], content["trials"])
    new = outcome.content(context.device)
    return {key: new[key] for key in ("verdict", "tally", "checks", "measures")}


if __name__ == "__main__":
    main()
