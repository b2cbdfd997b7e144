"""fastweights linearize"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastweights.cli.load import load_config, load_model, rounded_bits
from fastweights.cli.progress import STOPPING, reporter
from fastweights.cli.recipes import recipe_of, with_training_options
from fastweights.cli.verbs.generate import Request, write_continuation
from fastweights.lab.bench.linearized import crossover, memory_ratio, plot_generation
from fastweights.lab.bench.report import open_report
from fastweights.linearize.convert.attention_layers import PREFIX
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.handover import read_by_softmax
from fastweights.linearize.distill.budget import CacheBudget, LayerBudget, SoftmaxBudget
from fastweights.linearize.distill.conversion import require_ranking_alone
from fastweights.linearize.distill.phases import PhasePlan, plan_run
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.plan import ConversionPlan, StagePlan, plan
from fastweights.linearize.distill.recipes import RECIPE_NOTES, RECIPES
from fastweights.linearize.evaluate.criteria import CRITERIA, Criterion
from fastweights.linearize.evaluate.generation import TOP_K, GenerationRow, bench_generation
from fastweights.linearize.evaluate.ranking import read_ranking
from fastweights.render.units import layers_by_reason, layers_in_words
from fastweights.training.data.documents import Data
from fastweights.training.loop.checkpoint import model_source
from fastweights.training.loop.files import write_figure
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.signals import StopOnSignal
from fastweights.training.loop.tracking import track


def conversion(chosen: Namespace) -> Conversion:
    """The conversion that the options ask for."""
    data = Data(
        tuple(chosen.data),
        tuple(chosen.validation),
        chosen.length,
        chosen.responses,
        boundaries=not chosen.across,
        held_out=chosen.validation_tokens,
        field=chosen.field,
        weights=tuple(chosen.data_weights),
        stream=chosen.stream,
        template=chosen.template,
    )
    return Conversion(
        model=model_source(chosen.model),
        data=data,
        recipe=with_training_options(recipe_of(chosen), chosen),
        layers=chosen.layers,
        softmax_layers=chosen.softmax_layers,
        dtype=chosen.dtype or "auto",
        seed=chosen.seed,
        bits=chosen.bits,
        rank_by=_criterion(chosen),
        ranking=None if chosen.ranking is None else read_ranking(chosen.ranking),
        cache_budget=_cache_budget(chosen),
        state_budget=chosen.state_budget,
    )


def _criterion(chosen: Namespace) -> Criterion | None:
    return None if chosen.rank_by is None else CRITERIA[chosen.rank_by]


def _cache_budget(chosen: Namespace) -> CacheBudget | None:
    """What the cache may take, if the options say it.

    Raises:
        ValueError: If they say a length alone, or a number of layers, too.
    """
    if chosen.cache_budget is None:
        if chosen.cache_length is not None:
            raise ValueError("--cache-length is the length of --cache-budget; give both")
        return None
    if chosen.softmax_layers:
        raise ValueError("--softmax-layers and --cache-budget say the same; give one of the two")
    return CacheBudget(chosen.cache_budget, chosen.cache_length or chosen.length)


def print_plan(chosen: Namespace, console: Console) -> None:
    """Print what a conversion would do and take."""
    budget = _cache_budget(chosen) or LayerBudget(chosen.softmax_layers)
    dtype = None if chosen.dtype is None else getattr(torch, chosen.dtype)
    recipe = recipe_of(chosen)
    model = model_source(chosen.model)
    planned = plan(model, recipe, layers=chosen.layers, length=chosen.length, dtype=dtype)
    if chosen.state_budget is not None:
        planned = replace(planned, state=chosen.state_budget)
    criterion = None if budget == LayerBudget(0) else _criterion(chosen) or CRITERIA["recall"]
    if chosen.ranking is not None:
        require_ranking_alone(read_ranking(chosen.ranking), _criterion(chosen), budget)
        criterion = None
    measured = chosen.length, chosen.validation_tokens, criterion, chosen.state_budget
    phases = plan_run(model, recipe, planned, *measured)
    described = describe_plan(planned, recipe.analog), describe_budget(budget, planned)
    for line in [*chain(*described), *describe_phases(phases)]:
        console.print(line, soft_wrap=True)


def print_recipes(_: Namespace, console: Console) -> None:
    """Print the published recipes."""
    table = Table("recipe", "what it does", box=box.SIMPLE_HEAD)
    for name, recipe in RECIPES.items():
        stages = ", ".join(f"{stage.name} {stage.fit.steps:,}" for stage in recipe.stages)
        settings = f"{_attention(recipe.analog)}; steps: {stages}"
        table.add_row(Text(name), Text.assemble(RECIPE_NOTES[name], "\n", (settings, "dim")))
    console.print(table)


def _attention(analog: LinearAttentionConfig) -> str:
    said = f"rule {analog.rule}, features {analog.features}, window {analog.window}"
    said = f"{said} on average, by head" if analog.windows_by_head else said
    return f"{said}, sinks {analog.sinks}" if analog.sinks else said


def run(chosen: Namespace, console: Console) -> int:
    """Convert a model, as far as the chosen stage; the exit status."""
    with (
        reporter(console) as shown,
        track(chosen.track, shown) as watch,
        StopOnSignal(lambda: watch.note(STOPPING)) as stop,
    ):
        device = chosen.device.torch()
        complete = run_conversion(
            conversion(chosen),
            chosen.out,
            until=chosen.until,
            device=device,
            layout=Layout(chosen.shard, chosen.offload, chosen.recompute),
            reporter=watch,
            stop=stop,
            patience=chosen.patience,
        )
    shown = {"model": chosen.out / "model", "report": chosen.out / "report" / "report.html"}
    for name, path in shown.items():
        if path.exists():
            console.print(f"{name:<12}{path}", soft_wrap=True)
    if not complete:
        console.print("Stopped. Run the same command again to resume.")
    return 0 if complete else stop.exit_status


def generate(chosen: Namespace, _: Console) -> None:
    """Continue a text with a linearized model."""
    model, tokenizer = _load_linearized(chosen, rounded_bits(chosen))
    request = Request(
        prompt=chosen.prompt,
        tokens=chosen.tokens,
        temperature=chosen.temperature,
        top_k=_top_k(model),
        seed=chosen.seed,
        raw=chosen.raw,
    )
    read = read_by_softmax if chosen.prompt_by == "softmax" else None
    write_continuation(model, tokenizer, request, read)


def _top_k(model: Any) -> int | None:
    """Among how many tokens transformers' generate draws."""
    settings: Any = model.generation_config
    return TOP_K if settings.top_k is None else settings.top_k or None


def bench(chosen: Namespace, console: Console) -> None:
    """Measure generation beside softmax."""
    model, _ = _load_linearized(chosen)
    path = chosen.out or chosen.model / "bench.json"
    settings = {"model": chosen.model.name, "prompt": chosen.prompt, "seconds": chosen.seconds}
    report = open_report(
        "generation", path, settings, model.device, lambda row: _show(console, row)
    )
    for batch in chosen.batches:
        group = f"batch {batch}, {', '.join(map(str, chosen.tokens))} tokens"
        if not report.has(group):
            sizes = (batch,), chosen.prompt, chosen.tokens
            report.add(group, list(bench_generation(model, *sizes, chosen.seconds)))
    rows = [
        GenerationRow(**{f.name: row[f.name] for f in fields(GenerationRow)}) for row in report.rows
    ]
    write_figure(path.with_suffix(".png"), plot_generation(rows))
    for batch in chosen.batches:
        ahead = crossover(rows, batch)
        since = (
            "never ahead of softmax"
            if ahead is None
            else f"ahead of softmax from {ahead:,} tokens on"
        )
        console.print(f"batch {batch:<6}{since}")
    console.print(
        f"memory      {memory_ratio(rows):.2f} times as much after the most tokens as after the"
        " fewest"
    )
    console.print(
        f"{len(rows)} rows in {path}, drawn in {path.with_suffix('.png')}", soft_wrap=True
    )


def _show(console: Console, row: dict[str, Any]) -> None:
    console.print(
        f"{row['contender']:<12}{row['batch']} × {row['tokens']:,} tokens  {row['seconds']:.3g} s  "
        f"{1e3 * row['last']:.3g} ms per token  state {_bytes(row['state_bytes'])}",
        soft_wrap=True,
    )


def _load_linearized(chosen: Namespace, bits: int | None = None) -> tuple[Any, Any]:
    """The linearized model in a folder, and its tokenizer."""
    kind = load_config(chosen.model).model_type
    if not kind.startswith(PREFIX):
        raise ValueError(
            f"{chosen.model} is a {kind}, not a linearized model; `fastweights generate` continues"
            " texts with it, and `fastweights linearize` converts softmax models of transformers"
        )
    return load_model(chosen.model, chosen.device.torch(), bits=bits)


def describe_plan(plan: ConversionPlan, analog: LinearAttentionConfig) -> list[str]:
    """A plan in words."""
    layers = layers_in_words(attention.layer for attention in plan.converted)
    return [
        f"model       {plan.model_type}, {plan.parameters:,} parameters",
        f"linear      {layers}",
        f"attention   {_attention(analog)}",
        *(f"softmax     {line}" for line in layers_by_reason(plan.left)),
        f"state       {_bytes(plan.state)} per sequence, at any length",
        (
            f"cache       {_bytes(plan.cache_per_token)} per token before: more, from"
            f" {plan.break_even:,} tokens on"
        ),
        (
            f"memory      {_bytes(plan.weights)} of weights and {_bytes(plan.training)} to train,"
            " besides activations"
        ),
        *(_describe_stage(stage) for stage in plan.stages),
    ]


def describe_phases(phases: Sequence[PhasePlan]) -> list[str]:
    """What a run takes on this machine's CPU, in words."""
    parts = ", ".join(f"{phase.name} {_duration(phase.seconds)}" for phase in phases)
    return [
        f"phases      {parts}",
        f"time        {_duration(sum(phase.seconds for phase in phases))} on this machine's CPU,"
        " and the text to be read",
    ]


def _describe_stage(stage: StagePlan) -> str:
    stored = f", {_bytes(stage.stored)} of the teacher's logits" if stage.stored else ""
    return (
        f"stage       {stage.name}: {stage.trained:,} parameters, {stage.steps:,} steps,"
        f" {stage.tokens:,} tokens of length {stage.length:,}{stored}"
    )


def describe_budget(budget: SoftmaxBudget, plan: ConversionPlan) -> list[str]:
    """What a budget means, in words; of layers that are all alike where they are not ranked yet."""
    kept = budget.choose([attention.layer for attention in plan.converted], plan.caches)
    if not isinstance(budget, CacheBudget):
        return []
    softmax = [cache for cache in plan.caches if cache.layer in kept]
    rest = [cache for cache in plan.caches if cache.layer not in kept]
    taken = sum(cache.as_softmax(budget.length) for cache in softmax)
    taken += sum(cache.after(budget.length) for cache in rest)
    return [
        f"budget      {len(kept)} of {len(plan.converted)} layers can stay softmax:"
        f" {_bytes(taken)} of {_bytes(budget.size)} per sequence at {budget.length:,} tokens"
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
