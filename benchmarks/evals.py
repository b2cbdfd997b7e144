"""The published evaluation files by lm-evaluation-harness and by our own scorer: do they agree,
item by item?
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.lab.bench.machine import commit
from fastweights.lab.evals.harness import export, run_harness
from fastweights.lab.evals.items import SOURCES
from fastweights.lab.evals.score import Answer, Scores, score
from fastweights.train import model_folder


@dataclass(frozen=True)
class Agreement:
    """Of the two on a task.

    Attributes:
        difference: the largest, relative, between two sums of -log p
        answers: how many answers are the same text
    """

    items: int
    difference: float
    answers: int
    accuracy: float
    harness_accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a run, checkpoint or model folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the evaluation files")
    parser.add_argument(
        "--limit", type=int, default=40, help="items per task (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/evals"))
    chosen = parser.parse_args()
    folder = model_folder(chosen.model)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    tasks = {name: source.items(chosen.data)[: chosen.limit] for name, source in SOURCES.items()}
    export(tasks, chosen.out / "tasks")
    theirs = run_harness(model, tokenizer, chosen.out / "tasks", tasks)
    found = {
        name: _compared(theirs, name, score(model, tokenizer, items))
        for name, items in tasks.items()
    }
    content = {"commit": commit(), "items": sum(one.items for one in found.values())}
    content |= {"difference": max(one.difference for one in found.values())}
    content |= {"tasks": {name: asdict(one) for name, one in found.items()}}
    (chosen.out / "agreement.json").write_text(json.dumps(content, indent=1))
    print(json.dumps(content, indent=1))


def _compared(theirs: dict[str, Any], name: str, ours: Scores) -> Agreement:
    samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
    pairs = list(zip(samples, ours.rows, strict=True))
    answers = [
        (sample["filtered_resps"][0], row.text) for sample, row in pairs if isinstance(row, Answer)
    ]
    sums = [
        (sample["filtered_resps"], row.nll) for sample, row in pairs if not isinstance(row, Answer)
    ]
    return Agreement(
        items=len(pairs),
        difference=max((_difference(responses, nll) for responses, nll in sums), default=0.0),
        answers=sum(one == other for one, other in answers),
        accuracy=ours.metrics["accuracy"],
        harness_accuracy=theirs["results"][name]["acc,none"],
    )


def _difference(responses: Sequence[Any], nll: float | Sequence[float]) -> float:
    want = np.atleast_1d(nll)
    return float(
        np.max(np.abs(-np.array([float(response[0]) for response in responses]) - want) / want)
    )


if __name__ == "__main__":
    main()
