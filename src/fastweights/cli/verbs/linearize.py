"""fastweights linearize"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields, replace
from typing import Any

import torch
from rich.console import Console

from fastweights.cli.progress import STOPPING, reporter
from fastweights.cli.verbs.generate import Request, load_model, write_continuation
from fastweights.lab.bench.linearized import (
    GenerationRow,
    bench_generation,
    crossover,
    memory_ratio,
    plot_generation,
)
from fastweights.lab.bench.targets import open_report
from fastweights.linearize.convert.model_classes import LinearizedModel
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.methods import METHODS, LinearizationMethod, TransferConfig
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.plan import ConversionPlan, plan
from fastweights.linearize.distill.ranking import require_linear_layers
from fastweights.render.plots import png
from fastweights.runs.files import atomic_file
from fastweights.runs.layout import Layout
from fastweights.runs.optimizers import AdamW
from fastweights.runs.signals import StopOnSignal
from fastweights.runs.tracking import track
from fastweights.text.documents import Data
from fastweights.train.loop import Every

TRANSFORMERS_TOP_K = 50
"""Among how many tokens transformers draws unless a model says otherwise."""


def linearize(chosen: Namespace, console: Console) -> int | None:
    """Do what the verb after `linearize` says; the exit status, if it may be other than 0."""
    return chosen.act(chosen, console)


def _method(chosen: Namespace) -> LinearizationMethod:
    """The named method with what the options change of its linear attention."""
    method = METHODS[chosen.method]
    given = {
        name: value
        for name in ("features", "rule", "window", "sinks", "gates")
        if (value := getattr(chosen, name)) is not None
    }
    return replace(method, analog=replace(method.analog, **given))


def _with_training_options(method: LinearizationMethod, chosen: Namespace) -> LinearizationMethod:
    """`method` with what the options change of its training."""
    transfer, adapt = method.transfer, method.adapt
    if chosen.dropout is not None:
        transfer = replace(transfer or TransferConfig(), dropout=chosen.dropout)
    if transfer is not None:
        fit = _fit(transfer.fit, chosen, chosen.transfer_steps, chosen.transfer_lr)
        transfer = replace(transfer, fit=fit, blockwise=chosen.blockwise)
    if adapt is not None:
        loss = adapt.loss if chosen.kl is None else replace(adapt.loss, kl=chosen.kl)
        adapt = replace(
            adapt, loss=loss, fit=_fit(adapt.fit, chosen, chosen.finetune_steps, chosen.finetune_lr)
        )
    return replace(
        method,
        transfer=None if chosen.transfer_steps == 0 else transfer,
        adapt=None if chosen.finetune_steps == 0 else adapt,
    )


def _fit(fit: Fit, chosen: Namespace, steps: int | None, lr: float | None) -> Fit:
    """The settings of a stage, as far as options give them."""
    every = Every(chosen.log_every, chosen.eval_every, chosen.checkpoint_every)
    optimizer = None if lr is None else AdamW(lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    given = {
        "steps": steps or None,
        "batch": chosen.batch,
        "accumulate": chosen.accumulate,
        "optimizer": optimizer,
    }
    settings = replace(fit, every=every, seed=chosen.seed, bf16=chosen.bf16)
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def conversion(chosen: Namespace) -> Conversion:
    """The conversion that the options ask for."""
    data = Data(
        tuple(chosen.data),
        tuple(chosen.validation),
        chosen.length,
        chosen.responses,
        not chosen.across,
        held_out=chosen.validation_tokens,
        field=chosen.field,
        weights=tuple(chosen.data_weights),
        stream=chosen.stream,
    )
    return Conversion(
        model=chosen.model,
        data=data,
        method=_with_training_options(_method(chosen), chosen),
        layers=chosen.layers,
        softmax_layers=chosen.softmax_layers,
        dtype=chosen.dtype or "auto",
        seed=chosen.seed,
        bits=chosen.bits,
    )


def print_plan(chosen: Namespace, console: Console) -> None:
    """Print what a conversion would do and take."""
    dtype = None if chosen.dtype is None else getattr(torch, chosen.dtype)
    planned = plan(
        chosen.model, _method(chosen), layers=chosen.layers, length=chosen.length, dtype=dtype
    )
    require_linear_layers(chosen.softmax_layers, len(planned.converted))
    for line in describe_plan(planned):
        console.print(line, markup=False, soft_wrap=True)


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
            console.print(f"{name:<12}{path}", markup=False, soft_wrap=True)
    if not complete:
        console.print("Stopped. Run the same command again to resume.", markup=False)
    return 0 if complete else stop.exit_status


def generate(chosen: Namespace, _: Console) -> None:
    """Continue a text with a linearized model."""
    model, tokenizer = _load_linearized(chosen)
    request = Request(chosen.prompt, chosen.tokens, chosen.temperature, _top_k(model), chosen.seed)
    write_continuation(model, tokenizer, request)


def _top_k(model: LinearizedModel) -> int | None:
    """Among how many tokens transformers' generate draws."""
    settings: Any = model.generation_config
    return TRANSFORMERS_TOP_K if settings.top_k is None else settings.top_k or None


def bench(chosen: Namespace, console: Console) -> None:
    """Measure generation beside softmax."""
    model, _ = _load_linearized(chosen)
    path = chosen.out or chosen.model / "bench.json"
    settings = {"model": chosen.model.name, "prompt": chosen.prompt, "seconds": chosen.seconds}
    report = open_report(
        "generation", path, settings, model.device, lambda row: _show(console, row), quick=True
    )
    for batch in chosen.batches:
        group = f"batch {batch}, {', '.join(map(str, chosen.tokens))} tokens"
        if not report.has(group):
            report.add(
                group,
                list(
                    bench_generation(model, (batch,), chosen.prompt, chosen.tokens, chosen.seconds)
                ),
            )
    rows = [
        GenerationRow(**{f.name: row[f.name] for f in fields(GenerationRow)}) for row in report.rows
    ]
    with atomic_file(path.with_suffix(".png")) as new:
        new.write_bytes(png(plot_generation(rows)))
    for batch in chosen.batches:
        ahead = crossover(rows, batch)
        since = (
            "never ahead of softmax"
            if ahead is None
            else f"ahead of softmax from {ahead:,} tokens on"
        )
        console.print(f"batch {batch:<6}{since}", markup=False)
    console.print(
        f"memory      {memory_ratio(rows):.2f} times as much after the most tokens as after the"
        " fewest"
    )
    console.print(
        f"{len(rows)} rows in {path}, drawn in {path.with_suffix('.png')}",
        markup=False,
        soft_wrap=True,
    )


def _show(console: Console, row: dict[str, Any]) -> None:
    console.print(
        f"{row['contender']:<12}{row['batch']} × {row['tokens']:,} tokens  {row['seconds']:.3g} s  "
        f"{1e3 * row['last']:.3g} ms per token  state {_bytes(row['state_bytes'])}",
        markup=False,
        soft_wrap=True,
    )


def _load_linearized(chosen: Namespace) -> tuple[Any, Any]:
    """The linearized model in a folder, and its tokenizer."""
    model, tokenizer = load_model(chosen.model, chosen.device.torch())
    if not isinstance(model, LinearizedModel):
        raise ValueError(
            f"{chosen.model} is a {model.config.model_type}, not a linearized model; convert it"
            " first"
        )
    return model, tokenizer


def describe_plan(plan: ConversionPlan) -> list[str]:
    """A plan in words."""
    layers = ", ".join(str(attention.layer) for attention in plan.converted)
    stages = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in plan.seconds.items())
    return [
        f"model       {plan.model_type}, {plan.parameters:,} parameters",
        f"linear      layers {layers}",
        *(f"softmax     layer {layer}: {why}" for layer, why in plan.left),
        (
            f"trained     {plan.branch:,} parameters of feature maps, then {plan.adapter:,} of"
            " adapters"
        ),
        f"state       {_bytes(plan.state)} per sequence, at any length",
        (
            f"cache       {_bytes(plan.cache_per_token)} per token before: more, from"
            f" {plan.break_even:,} tokens on"
        ),
        (
            f"memory      {_bytes(plan.weights)} of weights and {_bytes(plan.training)} to train,"
            " besides activations"
        ),
        f"time        {stages or 'no training'} on this machine's CPU",
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
