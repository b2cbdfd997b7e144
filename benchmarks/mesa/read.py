"""The loss of the trained models by token position: ``python benchmarks/mesa/read.py``, after
train.py.

All models read the same sequences of the book that was held out, so that differences from MesaNet
are differences on the same tokens. MesaNet, and models trained with another start or with a random
number of steps, are also read with other solvers than their own. What the file holds already is not
read again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train import CONTENDERS, LENGTH, RANDOM, RATES, STARTS, folder

from fastweights.lab.bench.mesa import SOLVERS, by_token
from fastweights.mixers.mesa import use_solver
from fastweights.models import FastWeightsForCausalLM
from fastweights.recurrence import ConjugateGradient, Solver
from fastweights.train import ExistingTokenizer, Text, read_corpus, sequential_windows

SEQUENCES, BATCH = 64, 8
POSITIONS = (0, 16, 32, 64, 128, 256, LENGTH - 1)
MESA = "mesa"
OWN = "30 steps"
STEPS: dict[str, Solver] = {"0 steps": ConjugateGradient(0), **SOLVERS}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/mesa"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mesa_text.json"))
    chosen = parser.parse_args()
    rows: list[Row] = json.loads(chosen.out.read_text())["rows"] if chosen.out.exists() else []
    done = {(row["model"], row["lr"], row["solver"]) for row in rows}
    readings = _Readings(chosen.work)
    for name, rate, solver in wanted(chosen.work):
        if (name, rate, solver) not in done:
            rows.append(readings.row(name, rate, solver))
            print(name, f"lr {rate:g}", solver or "", f"{rows[-1]['nats']:.4f}", flush=True)
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(
                json.dumps({"positions": POSITIONS, "rows": rows}, indent=1, ensure_ascii=False)
            )


def wanted(work: Path) -> Iterator[tuple[str, float, str | None]]:
    """(model, learning rate, solver or None for none) of all models that are trained."""
    others = {
        MESA: tuple(STEPS),
        **dict.fromkeys((*STARTS, *RANDOM), tuple(n for n in STEPS if n.endswith("steps"))),
    }
    for rate in RATES:
        for name in (*CONTENDERS, *STARTS, *RANDOM):
            if (folder(work, name, rate) / "model").exists():
                yield from ((name, rate, solver) for solver in others.get(name, (None,)))


class _Readings:
    """Losses ``[n t]`` of models in the folder `work`, on the same sequences."""

    def __init__(self, work: Path) -> None:
        text = Text(
            (str(work / "train"),),
            (str(work / "held_out"),),
            ExistingTokenizer(str(work / "tokenizer")),
        )
        tokens = read_corpus(text).validation[: SEQUENCES * (LENGTH - 1) + 1]
        self.work, self.batches = work, list(sequential_windows(tokens, LENGTH, BATCH))
        self.mesa: dict[float, Tensor] = {}

    def row(self, name: str, rate: float, solver: str | None) -> Row:
        losses = self.losses(name, rate, solver)
        if rate not in self.mesa and (folder(self.work, MESA, rate) / "model").exists():
            self.mesa[rate] = self.losses(MESA, rate, OWN)
        from_mesa = losses - self.mesa[rate] if rate in self.mesa else None
        return {
            "model": name,
            "lr": rate,
            "solver": solver,
            "nats": losses.mean().item(),
            "by_position": by_position(losses),
            "from_mesa": None if from_mesa is None else by_position(from_mesa),
            "error": None if from_mesa is None else by_position(from_mesa, spread=True),
        }

    @torch.no_grad()
    def losses(self, name: str, rate: float, solver: str | None) -> Tensor:
        model = FastWeightsForCausalLM.from_pretrained(
            folder(self.work, name, rate) / "model"
        ).eval()
        if solver is None:
            return by_token(model, self.batches)
        with use_solver(model, STEPS[solver]):
            return by_token(model, self.batches)


def by_position(losses: Tensor, *, spread: bool = False) -> list[float]:
    """Means of ``[n t]`` between neighbours of `POSITIONS`; or the standard error of those means
    over sequences.
    """
    means = [losses[:, first:last].mean(1) for first, last in pairwise(POSITIONS)]
    return [(m.std() / len(m) ** 0.5 if spread else m.mean()).item() for m in means]


if __name__ == "__main__":
    main()
