"""The stage `decide`: kernels launched otherwise, and whole models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastweights.lab.bench.contenders import Phase, bind
from fastweights.lab.bench.day.plan import DayPlan, draw
from fastweights.lab.bench.day.rows import FiguresRow, VariantRow
from fastweights.lab.bench.day.variants import AS_IS, OF, VARIANTS
from fastweights.lab.bench.machine import Ceilings
from fastweights.lab.bench.ops import relative
from fastweights.lab.bench.problems import Problem
from fastweights.lab.bench.report import Header, Report
from fastweights.lab.bench.timing import (
    Failure,
    Function,
    Times,
    clock_of,
    time_in_turn,
    timed,
)

if TYPE_CHECKING:
    from fastweights.lab.bench.decode import StepRow
    from fastweights.models import FastWeightsForCausalLM

TEXT = "shakespeare"
"""Bundled with the library: there is no network."""


def compare_variants(problem: Problem, plan: DayPlan) -> Iterator[VariantRow]:
    """Yield the time and the results of every variant of a case, forward and with backward."""
    name = problem.name
    inputs = {n: x.requires_grad_() for n, x in draw(problem, plan.place).items()}
    run = problem.case.implementations(inputs)[0].load()
    for phase in Phase:
        calls = {v: partial(_inside, v, bind(run, inputs, phase)) for v in OF[name]}
        results = {v: _result(call) for v, call in calls.items()}
        working = {v: call for v, call in calls.items() if not isinstance(results[v], Failure)}
        times = time_in_turn(working, clock_of(plan.place), plan.budget)
        for variant in OF[name]:
            found: Any = times.get(variant, results[variant])
            yield VariantRow(
                op=name,
                phase=phase.value,
                variant=variant,
                difference=_distance(found, results[variant], results[AS_IS]),
                **timed(found, times.get(AS_IS)),
            )


def _inside(variant: str, call: Function) -> object:
    with VARIANTS[variant]():
        return call()


def _result(call: Function) -> list[Tensor] | Failure:
    try:
        found: Any = call()
    except Exception as error:
        return Failure.of(error)
    found = [found] if isinstance(found, Tensor) else found
    return [x for x in found if x is not None]


def _distance(found: Times | Failure, result: Any, wanted: Any) -> float | None:
    """How far results are from those wanted; None where there are none of either."""
    if isinstance(found, Failure) or isinstance(wanted, Failure):
        return None
    return max(relative(a.float(), b.float()) for a, b in zip(result, wanted, strict=True))


def time_token(plan: DayPlan, ceilings: Ceilings) -> Iterator[StepRow]:
    """Yield a token's time, by a CUDA graph where there is one."""
    from fastweights.lab.bench.decode import DecodePlan, StepRow, measure_model

    with tempfile.TemporaryDirectory() as folder:
        header = Header("token", None, {}, {}, {})
        report = Report(Path(folder) / "token.json", header, asdict(ceilings))
        build = partial(_preset, plan)
        measure_model(report, DecodePlan(budget=plan.budget), plan.preset, build, (1,))
    names = StepRow.__dataclass_fields__
    for row in report.rows:
        yield StepRow(**{name: row[name] for name in names})


def _preset(plan: DayPlan) -> FastWeightsForCausalLM:
    from fastweights.lab.bench.decode import preset_model, small_model

    if plan.rehearses:
        return small_model(plan.preset, plan.place, quick=True).bfloat16()
    return preset_model(plan.preset, plan.place).bfloat16()


def train(plan: DayPlan) -> Iterator[FiguresRow]:
    """Yield the losses and the tokens per second of a few steps in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        out, seconds = Path(folder) / "run", _fastweights(
            "train", "--data", TEXT, "--mixers", "metala", *plan.training,
            "--log-every", "1", "--out", f"{folder}/run", "--device", _device(plan),
        )  # fmt: skip
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    rates = sorted(row.get("tokens_per_second", 0.0) for row in rows)
    figures = {"seconds": seconds, "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"]}
    yield FiguresRow("train", {**figures, "tokens_per_second": rates[len(rates) // 2]})


def convert(plan: DayPlan) -> Iterator[FiguresRow]:
    """Yield what a linearization comes to: of the plan's model, or of a small Llama made here."""
    with tempfile.TemporaryDirectory() as folder:
        source = plan.model or _small_llama(Path(folder) / "llama", plan)
        out = Path(folder) / "linear"
        window = "4" if plan.rehearses else "64"
        seconds = _fastweights(
            "linearize", str(source), "--data", TEXT, "--window", window, *plan.linearizing,
            "--bf16", "--out", str(out), "--device", _device(plan),
        )  # fmt: skip
        found = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    kind = f"linearize {plan.model.name}" if plan.model else "linearize a Llama made here"
    yield FiguresRow(kind, {"seconds": seconds, **_numbers(found)})


def _device(plan: DayPlan) -> str:
    return "cpu" if plan.rehearses else "auto"


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    """The numbers at the top of a JSON file, and one level below."""
    flat = {
        f"{name} {inner}": value
        for name, values in found.items()
        if isinstance(values, dict)
        for inner, value in values.items()
    }
    return {n: v for n, v in {**found, **flat}.items() if isinstance(v, int | float)}


def _fastweights(*arguments: str) -> float:
    """Run a command of the library, and return its seconds."""
    start = monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "fastweights.cli", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    if found.returncode:
        said = (found.stderr.strip() or found.stdout.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(f"fastweights {arguments[0]} ends with {found.returncode}: {said}")
    return monotonic() - start


def _small_llama(folder: Path, plan: DayPlan) -> Path:
    """A model of softmax attention with random weights, and its tokenizer, of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastweights.train import Bytes

    torch.manual_seed(0)
    width, layers = (32, 1) if plan.rehearses else (512, 8)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if plan.rehearses else 8,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    Bytes().build([]).save_pretrained(folder)
    return folder
