"""Plans in words: lines with their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import singledispatch
from typing import Any

from fastweights.budget import TrainingPlan, Workload
from fastweights.budget.memory import RESERVE
from fastweights.recipes import ConversionBudget
from fastweights.render.units import bytes_in_words, millions, significant

Lines = Iterator[tuple[str, str]]


@singledispatch
def describe(found: Any) -> Lines:
    """A plan in words: lines with their names."""
    raise TypeError(f"a {type(found).__name__} is no plan")


@describe.register
def _(found: TrainingPlan) -> Lines:
    yield from _describe_model(found)
    yield from _describe_work(found.workload, found.total_operations)
    memory, workload = found.memory, found.workload
    parts = {
        f.name.replace("optimizer", "AdamW"): getattr(memory, f.name)
        for f in fields(memory)
        if f.name != "total"
    }
    yield "memory", f"{bytes_in_words(memory.total)} of each device{_room(workload)}"
    yield "", ", ".join(f"{name} {bytes_in_words(size)}" for name, size in parts.items() if size)
    yield (
        "at once",
        f"{found.sequences:,} sequences, each share in {found.accumulate:,} parts; room for"
        f" {found.most_sequences:,}",
    )
    if found.sent:
        yield (
            "sent",
            f"{bytes_in_words(found.sent)} by each device per step,"
            f" {found.sending_seconds_per_step:.3g} s of the link's time",
        )
    share = f"{100 * workload.utilization:g} % of the peak"
    yield "time", f"{found.seconds_per_step:.3g} s per step, {_hours(found)} at {share}"
    yield from _cost(found)
    yield from _describe_decoding(found)


@describe.register
def _(found: ConversionBudget) -> Lines:
    workload = found.workload
    yield "model", f"{millions(found.parameters)} parameters in bfloat16"
    yield from _describe_work(workload, found.total_operations)
    for stage in found.stages:
        yield (
            stage.name,
            f"{stage.steps:,} steps, {millions(stage.trained)} parameters trained,"
            f" {_giga(stage.operations)} per token",
        )
        yield (
            "",
            f"weights {bytes_in_words(stage.weights)}, AdamW {bytes_in_words(stage.optimizer)},"
            f" activations, gradients and loss {bytes_in_words(stage.working)}",
        )
    yield "memory", f"{bytes_in_words(found.memory)} of each device{_room(workload)}"
    yield "at once", f"{found.sequences:,} sequences, each share in {found.accumulate:,} parts"
    yield "time", f"{_hours(found)} at {100 * workload.utilization:g} % of the peak"
    yield from _cost(found)


def _describe_model(found: TrainingPlan) -> Lines:
    of, done = found.parameters, found.operations
    yield (
        "model",
        f"{millions(of.total)} parameters: embeddings {millions(of.embedding)}, mixers"
        f" {millions(of.mixers)}, MLPs {millions(of.mlp)}, norms {millions(of.norms)}",
    )
    rules = ", ".join(f"{rule} {_giga(count)}" for rule, count in done.recurrences.items())
    yield (
        "operations",
        f"per token: forward {_giga(done.forward)} (projections {_giga(done.projections)}, head"
        f" {_giga(done.head)}, {rules}), backward {_giga(done.backward)}, computed again"
        f" {_giga(found.recomputed)}",
    )


def _describe_work(workload: Workload, operations: float) -> Lines:
    steps = f"{workload.steps:,} steps of {workload.batch:,} × {workload.length:,}"
    yield (
        "training",
        f"{significant(workload.tokens, 4)} tokens in {steps}, {operations:.3g} operations",
    )
    placing, device = workload.placing, workload.device
    how = [name for name in ("shard", "recompute", "bf16") if getattr(placing, name)]
    peak = device.peak(placing.bf16) / 1e12
    yield (
        "devices",
        f"{placing.devices:,} × {device.name}, {peak:,.4g} TFLOP/s each: "
        + (", ".join(how) or "float32"),
    )


def _describe_decoding(found: TrainingPlan) -> Lines:
    done = found.decoding
    floors = ", ".join(
        f"{1e3 * done.floor(sequences):.3g} ms for {sequences:,}" for sequences in (1, 64)
    )
    yield (
        "decoding",
        f"{bytes_in_words(done.state)} of state per sequence after {done.context:,} tokens; a"
        f" token takes at least {floors}",
    )


def _cost(found: TrainingPlan | ConversionBudget) -> Lines:
    if found.cost is not None:
        yield "cost", f"{found.cost:,.0f} at {found.workload.price:g} per device and hour"


def _hours(found: TrainingPlan | ConversionBudget) -> str:
    hours, of_devices = significant(found.hours, 3), significant(found.device_hours, 4)
    return f"{hours} hours, {of_devices} device hours"


def _room(workload: Workload) -> str:
    room = (1 - RESERVE) * workload.device.memory
    return f", which has {bytes_in_words(room)} for it"


def _giga(count: float) -> str:
    return f"{significant(count / 1e9, 3)} GFLOP"
