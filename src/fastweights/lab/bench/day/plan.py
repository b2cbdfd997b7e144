"""What is asked of the GPU, and at which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastweights.lab.bench.contenders import Inputs, Sizes
from fastweights.lab.bench.problems import CHANNELS, LONG, MAIN, METALA, SMALL, Problem
from fastweights.lab.bench.timing import Budget

FAMILIES: dict[str, tuple[str, ...]] = {
    "tied": ("decay tied",),
    "gla": ("decay vector gentle", "decay vector steep"),
    "scalar": ("decay scalar", "decay none", "normalized decay none"),
    "delta": ("delta scalar", "delta none"),
    "mesa": ("mesa 30 steps", "mesa tol 1e-5"),
    "kda": ("delta vector",),
    "windowed": ("windowed linear 64", "landmarks 64"),
    "scan": ("scan real", "scan complex", "selective scan"),
    "layers": ("short convolution", "RMSNorm"),
    "softmax": ("softmax", "softmax window 64"),
}
"""Cases whose kernels belong together, those with the most to gain first."""

SUITE, MODELS = "suite", "models"
"""Beside the families: the tests, and whole models."""

GOALS = ("decay tied", "decay vector gentle", "decay scalar", "delta scalar", "mesa 30 steps")
"""The cases with a goal beside flash-linear-attention, in the order in which they are timed."""


@dataclass(frozen=True)
class DayPlan:
    """One session's settings.

    Attributes:
        device: where the kernels run: "cuda", or "cpu" to rehearse
        seconds: of a stage, by its own clock
        task_seconds: after which one group of rows is given up; a few have more
        processes: that compile at once
        workers: of the tests
        segmented: cuts time into segments
        plain: of the same widths, does not
        tiny: what the sanitizer can run
        model: of softmax attention, a folder; None for a small one made on the spot
        training: options of `fastweights train`
        linearizing: options of `fastweights linearize`
    """

    device: str = "cuda"
    seconds: float = 555.0
    task_seconds: float = 60.0
    processes: int = 14
    workers: int = 12
    main: Sizes = MAIN
    metala: Sizes = METALA
    long: Sizes = LONG
    small: Sizes = SMALL
    channels: Sizes = CHANNELS
    segmented: Sizes = Sizes(1, 2100, 2, 128, 128)
    plain: Sizes = Sizes(2, 300, 16, 128, 128)
    tiny: Sizes = Sizes(1, 70, 1, 32, 32)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    repeats: int = 20
    budget: Budget = Budget(0.4, 20)
    tests: tuple[str, ...] = ("tests/kernels/test_gpu.py",)
    preset: str = "metala-360m"
    model: Path | None = None
    training: tuple[str, ...] = ("--bf16", "--steps", "50", "--layers", "8", "--width", "512")
    linearizing: tuple[str, ...] = ("--transfer-steps", "30", "--finetune-steps", "30")

    @classmethod
    def rehearsal(cls) -> DayPlan:
        """Return the plan of a session with the CPU in the GPU's place, at tiny sizes."""
        tiny = Sizes(1, 70, 2, 16, 16)
        timed = ("main", "metala", "long", "small", "segmented", "plain")
        same: dict[str, Any] = dict.fromkeys(timed, tiny)
        short = ("--steps", "2", "--batch", "2", "--length", "32", "--layers", "1", "--width", "32")
        return cls(
            device="cpu",
            task_seconds=300.0,
            processes=2,
            workers=1,
            **same,
            channels=Sizes(1, 70, 8, 1, 1),
            tiny=Sizes(1, 9, 1, 16, 16),
            dtypes=(torch.bfloat16,),
            repeats=2,
            budget=Budget(0.001, 1),
            tests=(f"{cls.tests[0]}::test_every_kernel_agrees_with_float64",),
            preset="metala",
            training=("--bf16", *short),
            linearizing=("--transfer-steps", "2", "--finetune-steps", "2"),
        )

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)

    @property
    def rehearses(self) -> bool:
        return self.device == "cpu"

    def problem(self, name: str, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Problem:
        """Return a case at `sizes`; one of channels has sizes of its own, as long as asked."""
        problem = Problem(name, sizes, dtype)
        if problem.case.channels:
            channels = self.channels if sizes == self.main else self.channels._replace(h=96)
            wide = channels._replace(b=sizes.b, t=sizes.t, k=problem.case.state)
            return problem._replace(sizes=wide)
        return problem

    def timed(self) -> tuple[Problem, ...]:
        """Return what is timed, the most important first."""
        rest = [n for names in FAMILIES.values() for n in names if n not in (*GOALS, "softmax")]
        sizes = (
            *((name, self.main) for name in GOALS),
            ("decay tied", self.metala),
            *((name, self.long) for name in ("decay tied", "decay scalar", "delta scalar")),
            *((name, self.main) for name in ("scan real", "softmax")),
            *((name, self.main) for name in rest if name != "scan real"),
        )
        return tuple(dict.fromkeys(self.problem(*chosen) for chosen in sizes))


def family_of(case: str) -> str:
    """Return the family that a case belongs to."""
    return next(family for family, cases in FAMILIES.items() if case in cases)


def draw(problem: Problem, device: torch.device) -> Inputs:
    """Return a problem's inputs, drawn where they are used."""
    source = torch.Generator(device).manual_seed(0)
    with device:
        return problem.case.inputs(problem.sizes, problem.dtype, device, source)
