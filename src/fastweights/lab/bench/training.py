"""Benchmarks of training steps: small language models with equal parameters, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastweights.lab.bench.contenders import matching
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import (
    Budget,
    Function,
    TimedRow,
    Times,
    clock_of,
    time_in_turn,
    timed,
)
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.loop.optimizers import AdamW


@dataclass(frozen=True)
class TrainPlan:
    """The settings of the benchmark of training steps.

    Attributes:
        parameters: Number of weights of every model, reached by the width of its SwiGLU.
        compiled: Whether steps are measured by torch.compile as well.
    """

    only: str = "*"
    budget: Budget = Budget(seconds=5.0, runs=9)
    width: int = 256
    layers: int = 4
    parameters: int = 4_000_000
    batch: int = 4
    length: int = 512
    compiled: bool = True

    @classmethod
    def quick(cls, only: str = "*", *, compiled: bool = False) -> TrainPlan:
        return cls(
            only,
            Budget(0.2, 3),
            width=32,
            layers=2,
            parameters=70_000,
            batch=2,
            length=64,
            compiled=compiled,
        )

    def mixers(self) -> list[str]:
        """Return the names of the mixers to train.

        Raises:
            ValueError: If there are none.
        """
        return matching(self.only, list(MIXERS), "no mixer")


@dataclass(frozen=True, kw_only=True)
class TrainRow(TimedRow):
    """The time of forward, backward and optimiser step on one batch, compared with eager's."""

    mixer: str
    contender: str
    parameters: int
    tokens: int
    tokens_per_second: float | None


def run_training(report: Report, plan: TrainPlan, device: torch.device) -> None:
    """Measure the training steps of each mixer: one group of rows per mixer."""
    for name in plan.mixers():
        group = f"train {name}"
        if not report.has(group):
            report.add(group, _train_rows(name, plan, device))


def equal_config(name: str, plan: TrainPlan) -> FastWeightsConfig:
    """Return a configuration whose SwiGLU brings the model as near to `plan.parameters` as it
    can."""
    sizes = [_parameters(_config(name, plan, width)) for width in (1, 2)]
    slope = sizes[1] - sizes[0]
    return _config(name, plan, max(1, 1 + round((plan.parameters - sizes[0]) / slope)))


def _config(name: str, plan: TrainPlan, mlp: int) -> FastWeightsConfig:
    return FastWeightsConfig(
        vocab_size=256,
        hidden_size=plan.width,
        num_hidden_layers=plan.layers,
        intermediate_size=mlp,
        mixers=[{"name": name}],
    )


def _parameters(config: FastWeightsConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in set(FastWeightsForCausalLM(config).parameters()))


def _train_rows(name: str, plan: TrainPlan, device: torch.device) -> list[TrainRow]:
    torch.manual_seed(0)
    config = equal_config(name, plan)
    with torch.device(device):
        model = FastWeightsForCausalLM(config).train()
    functions = {"eager": _step(model, model, plan, device)}
    if plan.compiled:
        torch.compiler.reset()
        functions["torch.compile"] = _step(torch.compile(model), model, plan, device)
        with suppress(Exception):  # it compiles; what fails fails again where that is reported
            functions["torch.compile"]()
    times = time_in_turn(functions, clock_of(device), plan.budget)
    tokens = plan.batch * plan.length
    return [
        TrainRow(
            mixer=name,
            contender=who,
            parameters=_parameters(config),
            tokens=tokens,
            tokens_per_second=tokens / found.median if isinstance(found, Times) else None,
            **timed(found, times["eager"]),
        )
        for who, found in times.items()
    ]


def _step(
    forward: Callable[..., Any], model: nn.Module, plan: TrainPlan, device: torch.device
) -> Function:
    ids = torch.randint(
        256, (plan.batch, plan.length), generator=torch.Generator().manual_seed(0)
    ).to(device)
    optimizers = AdamW().build(model)

    def step() -> None:
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step
