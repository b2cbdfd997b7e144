"""A sweep on a folder of noise, by all processes that this module is started in together."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import beside_cpu  # noqa: F401 (before transformers)
from fastweights.lab.sweep import AllProcesses, Row, SweepModel, SweepPlan, follow, leading, sweep
from fastweights.lab.tasks import Segment, imagenet
from fastweights.lab.tasks.augmentation import Mixing, View
from fastweights.training.loop.processes import Processes, join_processes, leave_processes

NAMES = ("cat", "dog", "emu")


@dataclass(frozen=True)
class Corner(View):
    """A random part of the size, drawn as timm draws: by the generators of all three libraries."""

    size: int

    def __call__(self, image: Image.Image) -> Tensor:
        top, left = random.randrange(16), int(np.random.randint(16))
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 128
        return pixels[:, top : top + self.size, left : left + self.size] - 1 - torch.rand(()) / 9


def write_noise(folder: Path, each: int) -> None:
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        for i in range(each):
            noise = np.random.default_rng(i).integers(0, 256, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(noise).save(folder / name / f"{i}.png")


def plan(folder: Path) -> SweepPlan:
    """Two epochs of 15 images in batches of 8, mixed and shown several times."""
    protocol = imagenet.metala(folder, view=Corner(16))
    (train,) = protocol.train
    mixed = Segment(replace(train.task, mixing=Mixing()), train.examples)
    fields = {"hidden_size": 8, "num_hidden_layers": 1, "patch_size": 4, "stochastic_depth": 0.0}
    return SweepPlan(
        {"noise": replace(protocol, train=(mixed,))},
        (SweepModel("tiny", "linear", fields),),
        training={"epochs": 2, "batch": 8, "bf16": False, "best": False},
        rates=(1e-2,),
    )


def train(folder: Path, out: Path, processes: Processes) -> list[Row]:
    if not processes.is_first:
        follow(processes)
        return []
    with leading(processes):
        return sweep(plan(folder), out, AllProcesses(processes), listener=lambda _: None)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), join_processes(torch.device("cpu")))
    leave_processes()
