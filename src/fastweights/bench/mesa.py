"""What solving costs and brings: time, steps, and error or loss, at fixed steps and at tolerances (MesaNet Fig. 7)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fastweights.bench.cases import RecurrenceCase, mesa_case
from fastweights.bench.contenders import Phase, Sizes, bind
from fastweights.bench.ops import relative
from fastweights.bench.report import Report
from fastweights.bench.timing import Budget, Times, alternate, clock_of
from fastweights.evals.perplexity import token_losses
from fastweights.evaluate import evaluate
from fastweights.generate import stream
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.mesa import mesa_records, solved_by
from fastweights.recurrence import ConjugateGradient, Mesa, solver_statistics
from fastweights.train import Pretrained, Text, cover, read

STEPS = 30
SOLVERS = {f"{n} steps": ConjugateGradient(n) for n in (1, 2, 5, 10, 20, STEPS)} | {
    f"tol 1e-{n}": ConjugateGradient(STEPS, 10.0**-n) for n in range(1, 6)
}
KERNEL_SIZES = (Sizes(1, 2048, 8, 64, 64), Sizes(1, 2048, 8, 128, 128), Sizes(1, 8192, 8, 64, 64))
QUICK_SIZES = (Sizes(1, 64, 2, 8, 8),)
COUNTED = 512
"""Tokens whose steps are counted and whose errors are found."""


@dataclass(frozen=True)
class MesaPlan:
    """checkpoint  folder of a model whose loss is measured, on `text` (a source as `fastweights train` reads it)

    tokens  of that text's last tenth, in sequences of `length`, `batch` at a time; and tokens to decode
    """

    quick: bool = False
    checkpoint: Path | None = None
    text: str = "shakespeare"
    tokens: int = 32_768
    length: int = 1024
    batch: int = 8
    decoded: int = 64
    budget: Budget = Budget()

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        return QUICK_SIZES if self.quick else KERNEL_SIZES


@dataclass(frozen=True)
class SolveRow:
    """A record solved one way: steps per token on average, and the error of o against float64."""

    contender: str
    phase: str
    seconds: Times | None
    steps: float
    error: float
    note: str


@dataclass(frozen=True)
class LossRow:
    """A model whose Mesa layers solve one way.

    seconds            for reading all tokens
    loss               nats per token; by_position: of tokens from one of `positions` up to the next
    steps              per token and head on average; by_layer: of every layer
    tokens_per_second  decoded, one sequence
    """

    contender: str
    seconds: Times
    loss: float
    positions: list[int]
    by_position: list[float]
    steps: float
    by_layer: list[float]
    tokens_per_second: float


def run_mesa(report: Report, plan: MesaPlan, device: torch.device) -> None:
    """The kernels alone; or, with a checkpoint, a model's loss."""
    if plan.checkpoint is not None:
        if not report.has("loss"):
            report.add("loss", _losses(plan, plan.checkpoint, device))
        return
    for sizes in plan.sizes:
        for phase in Phase:
            if not report.has(group := f"mesa {sizes} {phase.value}"):
                report.add(group, _solved(plan, sizes, phase, device))


def _solved(plan: MesaPlan, sizes: Sizes, phase: Phase, device: torch.device) -> list[SolveRow]:
    cases = {name: mesa_case(solver) for name, solver in SOLVERS.items()}
    inputs = cases[f"{STEPS} steps"].inputs(sizes, torch.float32, device)
    functions = {name: bind(lambda x, c=case: evaluate(c.record(x))[0], inputs, phase) for name, case in cases.items()}
    found = alternate(functions, clock_of(device), plan.budget)
    rows = []
    for name, case in cases.items():
        steps, error = _quality(case, {n: x[:, :COUNTED] for n, x in inputs.items()})
        times = found[name]
        seconds, note = (times, "") if isinstance(times, Times) else (None, times.reason)
        rows.append(SolveRow(name, phase.value, seconds, steps, error, note))
    return rows


def _quality(case: RecurrenceCase, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """(steps per token, error of o)"""
    record = cast(Mesa, case.record(dict(inputs)))
    exact = replace(record, **{name: s.double() for name, s in record.streams.items()})
    width = record.q.shape[-1]
    want, _ = evaluate(replace(exact, solver=ConjugateGradient(2 * width, 1e-12)))
    return solver_statistics(record).steps.mean().item(), relative(evaluate(record)[0], want)


def _losses(plan: MesaPlan, folder: Path, device: torch.device) -> list[LossRow]:
    model = FastWeightsForCausalLM.from_pretrained(folder).to(device).eval()
    tokens = read(Text((plan.text,), tokenization=Pretrained(str(folder)))).validation[: plan.tokens]
    batches = list(cover(tokens, min(plan.length, len(tokens)), plan.batch))
    rows = []
    for name, solver in SOLVERS.items():
        with solved_by(model, solver):
            rows.append(_loss(name, model, batches, plan))
    return rows


def _loss(name: str, model: FastWeightsForCausalLM, batches: list[Tensor], plan: MesaPlan) -> LossRow:
    start = time.perf_counter()
    losses = [token_losses(model, ids) for ids in batches]
    seconds = time.perf_counter() - start
    full = torch.cat([loss for loss in losses if loss.shape[1] == losses[0].shape[1]])
    positions = [0, *(1 << n for n in range(4, 24) if 1 << n < full.shape[1]), full.shape[1]]
    layers = [solver_statistics(r).steps.mean().item() for r in mesa_records(model, batches[0][:1])]
    return LossRow(
        contender=name,
        seconds=Times.of([seconds]),
        loss=full.mean().item(),
        positions=positions,
        by_position=[full[:, first:last].mean().item() for first, last in pairwise(positions)],
        steps=sum(layers) / len(layers),
        by_layer=layers,
        tokens_per_second=_decoded_per_second(model, batches[0][:1], plan.decoded),
    )


def _decoded_per_second(model: FastWeightsForCausalLM, prompt: Tensor, count: int) -> float:
    tokens = stream(model, prompt.to(model.device), temperature=0)
    next(tokens)
    start = time.perf_counter()
    for _ in islice(tokens, count):
        pass
    return count / (time.perf_counter() - start)
