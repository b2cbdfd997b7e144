"""Recipes of linearization beside each other: ``python benchmarks/linearize_table.py TEACHERS``.

TEACHERS is the folder that benchmarks/linearize_teachers.py has written. Every recipe that trains
has the same number of tokens, and its own rate for each teacher: the one of five that leaves the
fewest nats per token on a seed of its own. Then it is run with three other seeds. What is measured
is held out from all training: perplexity, the share of what the window leaves open that the linear
side closes, and, of teachers that look far, the accuracy of tokens that repeat others by distance.
Each conversion is a run of its own in TEACHERS/table, and can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastweights.cli import plain_console
from fastweights.cli.progress import reporter
from fastweights.lab.bench.report import open_report
from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.distill.adapt import TokenLoss
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import (
    ADAPT,
    TRANSFER,
    AdaptationConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.linearize.distill.trained import Adapters, AllWeights
from fastweights.linearize.evaluate.far_text import FarText
from fastweights.train import AdamW, Every, StopOnSignal
from fastweights.training.data.documents import Data
from fastweights.training.loop.files import read_json, write_json
from linearize_far import recall
from linearize_teachers import FAR
from measuring import options

WINDOW, TEXT_LENGTH = 16, 256
TUNED_ON, SEEDS = 100, (0, 1, 2)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Of the stage in which the whole model adapts."""
TRANSFER_RATE = 1e-1
"""For LoLCATs' features."""
EVERY = Every(log=10, evaluation=1 << 20, checkpoint=1 << 20)
KL = TokenLoss(ce=0.0, kl=1.0)
Row = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """Updates, and sequences in each."""

    steps: int
    batch: int


@dataclass(frozen=True)
class Method:
    """A way to convert: its recipe with a budget and a rate; and whether anything is trained."""

    recipe: Callable[[Budget, float], LinearizationRecipe]
    trains: bool = True


def main() -> None:
    parser = options(__doc__, "linearize_table")
    parser.add_argument("teachers", type=Path)
    parser.add_argument("--only", choices=("text", *FAR), action="append", help="this teacher")
    parser.add_argument("--method", choices=METHODS, action="append", help="this recipe")
    parser.add_argument("--softmax-layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="updates in all")
    parser.add_argument("--batch", type=int, default=4, help="sequences per update")
    chosen = parser.parse_args()
    report = open_report("linearize_table", chosen.out)
    for teacher in chosen.only or ("text", *FAR):
        for name in chosen.method or METHODS:
            group = f"{teacher} {name} {chosen.softmax_layers} {chosen.steps}"
            if not report.has(group):
                report.add(group, list(rows(chosen, teacher, name)))


def _adapt(budget: Budget, lr: float, loss: TokenLoss, trained: Any) -> AdaptationConfig:
    fit = replace(ADAPT, steps=budget.steps, batch=budget.batch, every=EVERY, optimizer=_adam(lr))
    return AdaptationConfig(trained, loss, fit)


def _landmarks(count: int) -> LinearAttentionConfig:
    return LinearAttentionConfig("landmarks", count // 2, WINDOW)


def _transfer_then(
    loss: TokenLoss,
    trained: Any = Adapters(),
    analog: LinearAttentionConfig = LinearAttentionConfig(window=WINDOW),
    rate: float = TRANSFER_RATE,
) -> Callable[[Budget, float], LinearizationRecipe]:
    """LoLCATs: half of the updates for each stage."""

    def recipe(budget: Budget, lr: float) -> LinearizationRecipe:
        half = replace(budget, steps=budget.steps // 2)
        fit = replace(
            TRANSFER,
            steps=half.steps,
            batch=half.batch,
            every=EVERY,
            optimizer=_adam(rate),
        )
        stages = TransferConfig(fit=fit), _adapt(half, lr, loss, trained)
        return LinearizationRecipe(analog, stages)

    return recipe


def _landmarks_then(
    count: int, trained: Any = Adapters()
) -> Callable[[Budget, float], LinearizationRecipe]:
    def recipe(budget: Budget, lr: float) -> LinearizationRecipe:
        return LinearizationRecipe(_landmarks(count), (_adapt(budget, lr, KL, trained),))

    return recipe


def _untrained(count: int) -> Method:
    return Method(lambda budget, lr: LinearizationRecipe(_landmarks(count), ()), trains=False)


def _adam(lr: float) -> AdamW:
    return AdamW(lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


METHODS = {
    "LoLCATs": Method(_transfer_then(TokenLoss())),
    "LoLCATs, KL": Method(_transfer_then(KL)),
    "LoLCATs, KL, all weights": Method(_transfer_then(KL, AllWeights())),
    "64 landmarks, untrained": _untrained(64),
    "64 landmarks, KL": Method(_landmarks_then(64)),
    "64 landmarks, KL, all weights": Method(_landmarks_then(64, AllWeights())),
    "64 landmarks, transfer, KL": Method(_transfer_then(KL, analog=_landmarks(64))),
    "64 landmarks, transfer at 0.01, KL": Method(
        _transfer_then(KL, analog=_landmarks(64), rate=1e-2)
    ),
    "512 landmarks, untrained": _untrained(512),
    "512 landmarks, KL": Method(_landmarks_then(512)),
    "512 landmarks, transfer, KL": Method(_transfer_then(KL, analog=_landmarks(512))),
    "512 landmarks, KL, all weights": Method(_landmarks_then(512, AllWeights())),
}


def rows(chosen: argparse.Namespace, teacher: str, name: str) -> Iterator[Row]:
    """The rates on the seed that they are tuned on, then the best of them on the others."""
    method = METHODS[name]
    rates = RATES if method.trains else (0.0,)
    tuned = [run(chosen, teacher, name, lr, TUNED_ON) for lr in rates] if method.trains else []
    yield from tuned
    best = min(tuned, key=lambda row: row["linear"], default={"lr": rates[0]})["lr"]
    for seed in SEEDS:
        yield run(chosen, teacher, name, best, seed)


def run(chosen: argparse.Namespace, teacher: str, name: str, lr: float, seed: int) -> Row:
    """One conversion, measured."""
    folder = chosen.teachers / teacher
    recipe = METHODS[name].recipe(Budget(chosen.steps, chosen.batch), lr)
    data = data_of(chosen.teachers, teacher)
    conversion = Conversion(
        str(folder / "model"), data, recipe, softmax_layers=chosen.softmax_layers, seed=seed
    )
    title = f"{teacher} {name} {chosen.softmax_layers} {chosen.steps} {lr:g} {seed}"
    console = plain_console()
    console.print(f"\n{title}")
    out = chosen.teachers / "table" / "".join(c if c.isalnum() else "-" for c in title)
    with reporter(console) as watch, StopOnSignal() as stop:
        start, clock = time.perf_counter(), out.with_suffix(".json")
        if not run_conversion(conversion, out, reporter=watch, stop=stop):
            raise SystemExit("stopped; the same command goes on from here")
    if not clock.exists():
        write_json(clock, time.perf_counter() - start)
    trained = sum(stage.fit.steps * stage.fit.batch for stage in recipe.stages) * data.length
    return {
        "teacher": teacher,
        "method": name,
        "softmax_layers": chosen.softmax_layers,
        "lr": lr if METHODS[name].trains else None,
        "seed": seed,
        "tuning": seed == TUNED_ON,
        "tokens": trained,
        "seconds": read_json(clock),
        **_judged(out),
        **({"recalled": _recalled(folder, out)} if teacher in FAR else {}),
    }


def data_of(teachers: Path, teacher: str) -> Data:
    """The text that a teacher's conversions are trained and measured on."""
    far = FAR.get(teacher)
    text, length = ("corpus", TEXT_LENGTH) if far is None else (far.folder, far.length)
    files = (str(teachers / text / f"{name}.jsonl") for name in ("train", "validation"))
    train, validation = ((file,) for file in files)
    return Data(
        train, validation, length=length, boundaries=False, held_out=1 << 13, stream=1 << 16
    )


def _judged(out: Path) -> Row:
    """Nats per token by what attends, the share, and the bytes of the state after many tokens."""
    found = json.loads((out / "evaluation.json").read_text())
    sides = {
        name.replace(" ", "_"): found[name]["nats_per_token"]
        for name in ("softmax", "linear", "window only")
    }
    return {**sides, "share": found["share"], "state_bytes": found["memory"][-1]}


@torch.no_grad()
def _recalled(folder: Path, out: Path) -> Row:
    """Accuracy by distance, of the teacher and of the model that it has become."""
    text = FarText(**load_file(folder / "held_out.safetensors"))
    models = {"softmax": folder / "model", "linear": out / "model"}
    return {
        name: recall(AutoModelForCausalLM.from_pretrained(path), text)
        for name, path in models.items()
    }


if __name__ == "__main__":
    main()
