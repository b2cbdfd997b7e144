"""Benchmarks of Mesa's solvers at fixed steps and tolerances: time, steps, and error or loss
(MesaNet Fig. 7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastweights.analysis.capture import mesa_records
from fastweights.generate import stream
from fastweights.lab.bench.cases import RecurrenceCase, mesa_case
from fastweights.lab.bench.contenders import Phase, Sizes, bind
from fastweights.lab.bench.ops import relative
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import (
    Budget,
    Function,
    TimedRow,
    Times,
    clock_of,
    require_all,
    time_in_turn,
    timed,
)
from fastweights.methods import evaluate
from fastweights.mixers.mesa import use_solver
from fastweights.models import FastWeightsForCausalLM
from fastweights.recurrence import ConjugateGradient, Mesa, Solver, solver_statistics
from fastweights.training.data.corpus import Text, read_corpus
from fastweights.training.data.tokenizers import ExistingTokenizer
from fastweights.training.data.windows import sequential_windows
from fastweights.training.language.perplexity import token_losses

STEPS = 30
SOLVERS = {f"{n} steps": ConjugateGradient(n) for n in (1, 2, 5, 10, 20, STEPS)} | {
    f"tol 1e-{n}": ConjugateGradient(STEPS, 10.0**-n) for n in range(1, 6)
}
KERNEL_SIZES = (Sizes(1, 2048, 8, 64, 64), Sizes(1, 2048, 8, 128, 128), Sizes(1, 8192, 8, 64, 64))
QUICK_SIZES = (Sizes(1, 64, 2, 8, 8),)
COUNTED = 512
"""Tokens of the sequence on which steps are counted and errors are measured."""


@dataclass(frozen=True)
class MesaPlan:
    """The settings of the benchmark of Mesa's solvers.

    Attributes:
        checkpoint: Folder of a model whose loss is measured; None to measure kernels.
        text: Source of the text for it, as `fastweights train` reads it.
        tokens: Tokens of that text's last tenth, in sequences of `length`, `batch` at a time.
        decoded: Tokens in a timed call of decoding.
    """

    quick: bool = False
    checkpoint: Path | None = None
    text: str = "shakespeare"
    tokens: int = 32_768
    length: int = 1024
    batch: int = 8
    decoded: int = 8
    budget: Budget = Budget()

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        return QUICK_SIZES if self.quick else KERNEL_SIZES


@dataclass(frozen=True, kw_only=True)
class SolveRow(TimedRow):
    """The time of one solver on one record, compared with all fixed steps; its mean steps per
    token, and the error of o against float64."""

    contender: str
    phase: str
    steps: float
    error: float


@dataclass(frozen=True)
class LossRow:
    """The loss and speed of a model whose Mesa layers use one solver.

    Attributes:
        loss: Nats per token.
        by_position: Loss of the tokens from one of `positions` up to the next.
        steps: Mean steps per token and head.
        by_layer: Mean steps of every layer.
        seconds: Time to read one sequence, in turn with the other solvers.
        over: That time / that of all fixed steps.
        tokens_per_second: Speed of decoding after that sequence, again in turn.
    """

    contender: str
    loss: float
    positions: list[int]
    by_position: list[float]
    steps: float
    by_layer: list[float]
    seconds: Times
    over: float
    tokens_per_second: float


def run_mesa(report: Report, plan: MesaPlan, device: torch.device) -> None:
    """Measure the kernels alone, or the loss of a checkpoint if the plan names one."""
    if plan.checkpoint is not None:
        if not report.has("loss"):
            report.add("loss", _losses(plan, plan.checkpoint, device))
        return
    for sizes in plan.sizes:
        for phase in Phase:
            if not report.has(group := f"mesa {sizes} {phase.value}"):
                report.add(group, _solve_rows(plan, sizes, phase, device))


def _solve_rows(plan: MesaPlan, sizes: Sizes, phase: Phase, device: torch.device) -> list[SolveRow]:
    cases = {name: mesa_case(solver) for name, solver in SOLVERS.items()}
    inputs = cases[f"{STEPS} steps"].inputs(sizes, torch.float32, device)
    functions = {
        name: bind(lambda x, c=case: evaluate(c.record(x))[0], inputs, phase)
        for name, case in cases.items()
    }
    found = time_in_turn(functions, clock_of(device), plan.budget)
    rows = []
    for name, case in cases.items():
        steps, error = _quality(case, {n: x[:, :COUNTED] for n, x in inputs.items()})
        fields = timed(found[name], found[f"{STEPS} steps"])
        row = SolveRow(contender=name, phase=phase.value, steps=steps, error=error, **fields)
        rows.append(row)
    return rows


def _quality(case: RecurrenceCase, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """(steps per token, error of o)"""
    record = cast(Mesa, case.record(dict(inputs)))
    wide: dict[str, Any] = {name: s.double() for name, s in record.streams.items()}
    exact = replace(record, **wide)
    width = record.q.shape[-1]
    want, _ = evaluate(replace(exact, solver=ConjugateGradient(2 * width, 1e-12)))
    return solver_statistics(record).steps.mean().item(), relative(evaluate(record)[0], want)


def _losses(plan: MesaPlan, folder: Path, device: torch.device) -> list[LossRow]:
    model = FastWeightsForCausalLM.from_pretrained(folder).to(device).eval()
    tokens = read_corpus(
        Text((plan.text,), tokenization=ExistingTokenizer(str(folder)))
    ).validation[: plan.tokens]
    batches = list(sequential_windows(tokens, min(plan.length, len(tokens)), plan.batch))
    reading, decoding = (
        require_all(time_in_turn(calls, clock_of(device), plan.budget))
        for calls in _calls(model, batches[0][:1].to(device), plan)
    )
    full = reading[f"{STEPS} steps"].median
    return [
        _loss_row(
            name, model, batches, times, times.median / full, plan.decoded / decoding[name].median
        )
        for name, times in reading.items()
    ]


@torch.no_grad()
def _loss_row(
    name: str,
    model: FastWeightsForCausalLM,
    batches: list[Tensor],
    seconds: Times,
    over: float,
    speed: float,
) -> LossRow:
    with use_solver(model, SOLVERS[name]):
        losses, records = (
            by_token(model, batches),
            mesa_records(model, batches[0][:1].to(model.device)),
        )
    layers = [solver_statistics(record).steps.mean().item() for record in records]
    positions = _positions(losses.shape[1])
    return LossRow(
        contender=name,
        loss=losses.mean().item(),
        positions=positions,
        by_position=[losses[:, first:last].mean().item() for first, last in pairwise(positions)],
        steps=sum(layers) / len(layers),
        by_layer=layers,
        seconds=seconds,
        over=over,
        tokens_per_second=speed,
    )


def _calls(
    model: FastWeightsForCausalLM, ids: Tensor, plan: MesaPlan
) -> tuple[dict[str, Function], ...]:
    """By solver: reading the sequence ``ids [1 t]``; and decoding some tokens after it, with each
    call others.
    """
    reading: dict[str, Function] = {
        name: partial(_read, model, solver, ids) for name, solver in SOLVERS.items()
    }
    decoding: dict[str, Function] = {}
    for name, solver in SOLVERS.items():
        tokens = stream(model, ids, temperature=0)
        decoding[name] = partial(_decode, model, solver, tokens, plan.decoded)
    return reading, decoding


@torch.no_grad()
def _read(model: FastWeightsForCausalLM, solver: Solver, ids: Tensor) -> None:
    with use_solver(model, solver):
        model(ids, use_cache=False, logits_to_keep=1)


def _decode(
    model: FastWeightsForCausalLM, solver: Solver, tokens: Iterator[Tensor], count: int
) -> None:
    with use_solver(model, solver):
        for _ in islice(tokens, count):
            pass


def _positions(length: int) -> list[int]:
    """0, 16, 32, 64 and so on, and the end."""
    return [0, *(1 << n for n in range(4, 24) if 1 << n < length), length]


@torch.no_grad()
def by_token(model: FastWeightsForCausalLM, batches: list[Tensor]) -> Tensor:
    """Return the loss ``[n t-1]`` of every token of the sequences of full length, in nats."""
    losses = [token_losses(model, ids) for ids in batches]
    return torch.cat([loss for loss in losses if loss.shape[1] == losses[0].shape[1]])
