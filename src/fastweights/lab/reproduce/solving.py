"""Measurements of what the Mesa layers of a trained model solve, and what fewer steps cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.analysis.capture import mesa_records
from fastweights.lab.reproduce.accuracy import TaskExperiment, TaskTrial
from fastweights.lab.reproduce.claim import Trial, TrialContext
from fastweights.lab.reproduce.measures import Measure
from fastweights.lab.reproduce.text import TextProbe
from fastweights.lab.sweep.trainer import TaskStage, train
from fastweights.methods import evaluate
from fastweights.mixers import MesaLayer
from fastweights.mixers.mesa import use_solver
from fastweights.models import FastWeightsForCausalLM
from fastweights.recurrence import (
    ConjugateGradient,
    Decay,
    Mesa,
    condition_numbers,
    solver_statistics,
)
from fastweights.training.data.tokens import TokenText
from fastweights.training.language.perplexity import nll_by_position
from fastweights.training.loop.processes import Alone

STEPS, ALLOWED = "steps per token", "steps allowed"
ADDED, BY_STEPS = "loss added to that of 30 steps", "accuracy by steps"


@dataclass(frozen=True)
class Solvers(TextProbe):
    """A probe of the loss with other `solvers` in place of the model's own, by name.

    On so many `tokens` in sequences of `length`, which may exceed that of training, it measures the
    loss, what it adds to that of the solver named `base` in the first and last quarter of the
    positions, the steps taken on average, and those allowed.
    """

    solvers: Mapping[str, ConjugateGradient]
    base: str
    tokens: int
    length: int

    def measures(
        self, series: str, seed: int, model: FastWeightsForCausalLM, tokens: TokenText
    ) -> Iterator[Measure]:
        losses = {}
        for name, solver in self.solvers.items():
            with use_solver(model, solver):
                losses[name] = nll_by_position(
                    model, tokens[: self.tokens], self.length, batch=8
                ).nll
                yield Measure(name, self._steps(model, tokens), quantity=STEPS, seed=seed)
            yield Measure(name, solver.max_steps, quantity=ALLOWED, seed=seed)
            yield Measure(name, float(losses[name].mean()), seed=seed)
        quarter = self.length // 4
        for name in [name for name in losses if name != self.base]:
            added = losses[name] - losses[self.base]
            yield Measure(name, float(added[:quarter].mean()), "first quarter", ADDED, seed)
            yield Measure(name, float(added[-quarter:].mean()), "last quarter", ADDED, seed)

    def _steps(self, model: FastWeightsForCausalLM, tokens: TokenText) -> float:
        records = mesa_records(model, _ids(model, tokens, self.length))
        return float(np.mean([solver_statistics(record).steps.mean().item() for record in records]))


@dataclass(frozen=True)
class FewerSteps(Trial):
    """A trial of one model of a task, from one seed, that measures its accuracy in per cent: as it
    is, and where solving stops after each of several numbers of steps.

    A model without Mesa layers takes no steps, whatever it is given. Models are those at the end of
    their training, at the learning rate that the task's other seeds have chosen.

    Attributes:
        cell: The task, and how its models are trained.
        seed: Seed of weights and data.
        steps: The numbers of steps; 0 is gated linear attention.
    """

    cell: TaskTrial
    seed: int
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.cell.name}, seed {self.seed}"

    @property
    def files(self) -> tuple[str, ...]:
        return self.cell.files

    def run(self, context: TrialContext) -> list[Measure]:
        runs = self.cell.tuned_plan(context).runs()
        judged = next(run for run in runs if run.seed == self.seed)
        stage = train(judged, processes=Alone(context.device))
        return list(self._measures(stage))

    def _measures(self, stage: TaskStage) -> Iterator[Measure]:
        yield Measure(self.cell.series, 100 * stage.test_score().accuracy, seed=self.seed)
        solves = any(isinstance(module, MesaLayer) for module in stage.model.modules())
        for steps in self.steps if solves else (0,):
            with use_solver(stage.model, ConjugateGradient(steps)) if solves else nullcontext():
                accuracy = stage.test_score().accuracy
            yield Measure(self.cell.series, 100 * accuracy, steps, BY_STEPS, self.seed)


@dataclass(frozen=True)
class StepsExperiment(TaskExperiment):
    """An experiment of trials on tasks whose models are measured with fewer steps, each by itself.

    Attributes:
        steps: The numbers of steps.

    Raises:
        ValueError: If a trial has no seeds that choose its learning rate.
    """

    trains_together = False
    steps: tuple[int, ...] = (0, 30)

    def __post_init__(self) -> None:
        if not all(cell.effort.tuning for cell in self.cells):
            raise ValueError(
                "seeds of their own choose the learning rates of models that are measured after"
                " fewer steps; give the budget of every trial its `tuning`"
            )

    def trials(self) -> Sequence[Trial]:
        seeds = dict.fromkeys(seed for cell in self.cells for seed in cell.effort.seeds)
        return [
            FewerSteps(cell, seed, self.steps)
            for seed in seeds
            for cell in self.cells
            if seed in cell.effort.seeds
        ]


@dataclass(frozen=True)
class MesaDiagnostics(TextProbe):
    """A probe of the linear systems in a model's Mesa layers, on so many `sequences`.

    Over all heads, it measures the rank correlation of the mean γ with the condition number of H_t
    + Λ in the last quarter of `length` tokens, with how often it grew since the first quarter, with
    the steps to a residual of 0.001, and with the cosine between the output and that of gated
    linear attention, which solves nothing.
    """

    length: int
    sequences: int = 1

    @torch.no_grad()
    def measures(
        self, series: str, seed: int, model: FastWeightsForCausalLM, tokens: TokenText
    ) -> Iterator[Measure]:
        heads = [
            _inside(record)
            for record in mesa_records(model, _ids(model, tokens, self.length, self.sequences))
        ]
        gamma, *others = (torch.cat(column) for column in zip(*heads, strict=True))
        names = ("condition number", "growth of the condition number", "steps", "cosine to GLA")
        for name, values in zip(names, others, strict=True):
            yield Measure(name, rank_correlation(gamma, values), seed=seed)


def _ids(
    model: FastWeightsForCausalLM, tokens: TokenText, length: int, sequences: int = 1
) -> Tensor:
    shown = np.asarray(tokens[: sequences * length])
    return torch.tensor(shown, dtype=torch.long, device=model.device).view(sequences, length)


def _inside(record: Mesa) -> tuple[Tensor, ...]:
    """``[h]`` each: γ, the last condition number, its growth, steps, cosine."""
    quarter = len(record) // 4
    condition = condition_numbers(record)
    first, last = condition[:, :quarter].mean((0, 1)), condition[:, -quarter:].mean((0, 1))
    steps = (
        solver_statistics(replace(record, solver=ConjugateGradient(tol=1e-3)))
        .steps.double()
        .mean((0, 1))
    )
    plain = Decay(record.q, record.k, record.beta * record.v, record.log_decay)
    cosine = F.cosine_similarity(evaluate(record)[0], evaluate(plain)[0], dim=-1).mean((0, 1))
    assert record.log_decay is not None
    return record.log_decay.exp().mean((0, 1, 3)), last, last / first, steps, cosine


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation of numbers that are all different."""
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return torch.corrcoef(ranks)[0, 1].item()
