"""What of landmarks does what: ``python benchmarks/linearize_ablations.py TEACHERS``.

TEACHERS is the folder that benchmarks/linearize_teachers.py has written. Landmarks are placed among
keys of the training text, with one thing changed at a time, and nothing is trained; text that is
held out is read by the teacher, by the model that it has become, and by its window alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Generator, Tensor

from fastweights.lab.bench.report import open_report
from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.convert import branch, landmark_branch, landmarks
from fastweights.linearize.convert.modes import Student, Teacher, WindowOnly
from fastweights.linearize.distill.conversion import Conversion
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.run import ConversionRun
from fastweights.linearize.distill.student import StudentModel
from fastweights.linearize.evaluate.comparison import (
    LINEAR,
    SOFTMAX,
    WINDOW_ONLY,
    compare_with_softmax,
)
from fastweights.linearize.evaluate.far_text import FarText
from fastweights.linearize.evaluate.share import share_of
from fastweights.recurrence import WindowedLinear
from linearize_far import recall
from linearize_table import SEEDS, WINDOW, Row, data_of
from linearize_teachers import FAR
from measuring import options

MODES = {SOFTMAX: Teacher(), LINEAR: Student(), WINDOW_ONLY: WindowOnly()}
Change = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Ablation:
    """How many landmarks there are, beside which window, and what of the library is another while
    they are placed and read."""

    landmarks: int = 64
    window: int = WINDOW
    changes: tuple[Change, ...] = ()

    @property
    def config(self) -> LinearAttentionConfig:
        return LinearAttentionConfig("landmarks", self.landmarks // 2, self.window)


def _equal_directions(metric: Tensor) -> Tensor:
    """The root of an identity that is as large as a metric."""
    return metric.diagonal().mean().sqrt() * torch.eye(len(metric), dtype=metric.dtype)


def _random_keys(points: Tensor, count: int, generator: Generator) -> Tensor:
    return points[torch.randperm(len(points), generator=generator)[:count]]


def _on_its_own_scale(self: Any, *streams: Any) -> WindowedLinear:
    return branch.WindowedBranch.windowed(self, *streams[:5])


METRIC = partial(patch.object, landmarks, "_square_root", _equal_directions)
START = partial(patch.object, landmarks, "_spread", _random_keys)
CLUSTER = partial(patch.object, landmarks, "cluster", _random_keys)
GAMMA = partial(patch.object, landmark_branch, "ON_ONE_SCALE", branch.START)
SCALE = partial(patch.object, landmark_branch.LandmarkBranch, "windowed", _on_its_own_scale)

ABLATIONS = {
    "nothing": Ablation(),
    "distance of keys": Ablation(changes=(METRIC,)),
    "k-means from random keys": Ablation(changes=(START,)),
    "random keys, no k-means": Ablation(changes=(CLUSTER,)),
    "γ = 0.1": Ablation(changes=(GAMMA,)),
    "γ = 0.1, no scale in common": Ablation(changes=(GAMMA, SCALE)),
    "window 64": Ablation(window=64),
    "16 landmarks": Ablation(16),
    "256 landmarks": Ablation(256),
    "512 landmarks": Ablation(512),
}
"""Of 64 landmarks beside a window of 16, what is another."""


def main() -> None:
    parser = options(__doc__, "linearize_ablations")
    parser.add_argument("teachers", type=Path)
    parser.add_argument("--only", choices=("text", *FAR), action="append", help="this teacher")
    parser.add_argument("--change", choices=ABLATIONS, action="append", help="this change")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="with this seed")
    parser.add_argument("--work", type=Path, help="folder of texts and landmarks")
    chosen = parser.parse_args()
    report = open_report("linearize_ablations", chosen.out)
    work = chosen.work or chosen.teachers / "ablations"
    runs = product(chosen.only or ("text", *FAR), chosen.change or ABLATIONS, chosen.seed or SEEDS)
    for teacher, name, seed in runs:
        if not report.has(group := f"{teacher}-{name}-{seed}"):
            report.add(group, [ablate(chosen.teachers, teacher, name, seed, work / group)])


@torch.no_grad()
def ablate(teachers: Path, teacher: str, name: str, seed: int, out: Path) -> Row:
    """One change, measured."""
    ablation, folder, start = ABLATIONS[name], teachers / teacher, time.perf_counter()
    recipe = LinearizationRecipe(ablation.config, ())
    conversion = Conversion(str(folder / "model"), data_of(teachers, teacher), recipe, seed=seed)
    print(f"{teacher}, {name}, seed {seed}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as changed:
        for change in ablation.changes:
            changed.enter_context(change())
        student = StudentModel.begin(ConversionRun(conversion, out))
        batches = student.text.validation.sequential_batches(4)
        found = compare_with_softmax(student.model, batches, MODES)
        recalled = _recalled(student.model, folder) if teacher in FAR else None
    sides = {mode.replace(" ", "_"): side.row()["nats_per_token"] for mode, side in found.items()}
    return {
        "teacher": teacher,
        "method": name,
        "seed": seed,
        "seconds": time.perf_counter() - start,
        **sides,
        "share": share_of(found).value,
        "state_bytes": student.run.plan.state,
        **({} if recalled is None else {"recalled": recalled}),
    }


def _recalled(model: Any, folder: Path) -> Row:
    """Accuracy by distance, of the teacher and of the model."""
    text = FarText(**load_file(folder / "held_out.safetensors"))
    return {mode: recall(model, text, MODES[mode]) for mode in (SOFTMAX, LINEAR)}


if __name__ == "__main__":
    main()
