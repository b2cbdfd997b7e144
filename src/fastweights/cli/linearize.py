"""fastweights linearize"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from fastweights.cli.arguments import Parser, add_device
from fastweights.cli.imports import DTYPES
from fastweights.cli.progress import reporter
from fastweights.lab.bench.linearized import (
    TOKENS,
    GenerationRow,
    bench_generation,
    crossover,
    memory_ratio,
    plot_generation,
)
from fastweights.lab.bench.targets import open_report
from fastweights.linearize.convert.analog import FEATURE_MAPS, RULES
from fastweights.linearize.convert.families import LinearizedModel
from fastweights.linearize.distill.baselines import METHODS, LinearizationMethod, TransferConfig
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.plan import ConversionPlan, plan
from fastweights.render.plots import png
from fastweights.runs.checkpoint import model_folder, no_progress_bars
from fastweights.runs.files import atomic_file
from fastweights.runs.optimizers import AdamW
from fastweights.runs.signals import StopOnSignal
from fastweights.text.documents import Data
from fastweights.train.loop import Every

_HELP = {
    "convert": (
        "attach the linear attentions and test that a window over the whole text changes nothing"
    ),
    "transfer": "… and train them on the softmax's outputs",
    "rank-layers": "… and measure which layers do damage when they are linear",
    "finetune": "… and adapt the model to them with LoRA",
    "eval": "… and compare the model with its softmax, and with each side of its attention alone",
    "report": "… and draw the report",
    "export": "… and write the model: the same as run",
    "run": (
        "all of it, which a MODEL without a verb means; the same command again goes on where it was"
        " stopped"
    ),
}


def linearize(parser: Parser) -> Callable[[Namespace, Console], None]:
    """Make a pretrained softmax model linear: attention transfer, LoRA, constant-memory
    generation.
    """
    parser.implied = "run"
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    text = "what a conversion would do and take; reads no weights"
    _add_plan(verbs.add_parser("plan", help=text, description=text))
    for verb, text in _HELP.items():
        subparser = verbs.add_parser(verb, help=text, description=text)
        _add_run(subparser)
        subparser.set_defaults(act=_run, until="export" if verb == "run" else verb)
    text = "continue a text with a linearized model, in constant memory"
    _add_generate(verbs.add_parser("generate", help=text, description=text))
    text = "time and memory of generation beside the same model with softmax"
    _add_bench(verbs.add_parser("bench", help=text, description=text))
    return lambda chosen, console: chosen.act(chosen, console)


def _add_plan(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="folder or name on the Hugging Face hub")
    parser.add_argument(
        "--length",
        type=int,
        default=1024,
        help="tokens per training sequence; default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        metavar="|".join(DTYPES),
        help="of the weights (default: as they are)",
    )
    _add_method(parser.add_argument_group("method"))
    parser.set_defaults(act=_plan)


def _add_run(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="folder or name on the Hugging Face hub")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    _add_data(parser.add_argument_group("text"))
    _add_method(parser.add_argument_group("method"))
    _add_training(parser.add_argument_group("training"))
    parser.add_argument(
        "--dtype",
        type=_dtype,
        metavar="|".join(DTYPES),
        help="of the weights (default: as they are)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(4, 8),
        help="of the frozen weights in training, to save memory (bitsandbytes)",
    )
    add_device(parser)


def _add_data(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help=(
            "files of text, Alpaca JSON or chat JSONL (also .gz), folders, globs, shakespeare,"
            " hub:NAME[:SPLIT]"
        ),
    )
    group.add_argument(
        "--validation", nargs="+", default=(), metavar="SOURCE", help="default: a part of the data"
    )
    group.add_argument(
        "--length", type=int, default=Data.length, help="tokens per sequence; default: %(default)s"
    )
    group.add_argument(
        "--responses", action="store_true", help="learn the responses of instruction data only"
    )
    group.add_argument(
        "--across", action="store_true", help="let tokens see other documents packed with theirs"
    )


def _add_method(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--method",
        choices=METHODS,
        default="lolcats",
        help="a published way, which the other options change",
    )
    add("--features", choices=FEATURE_MAPS, help="feature map φ")
    add("--rule", choices=RULES, help="what a layer becomes")
    add(
        "--window",
        type=int,
        metavar="TOKENS",
        help="of softmax beside linear attention; 0 for none",
    )
    add(
        "--layers",
        type=_numbers,
        metavar="0,1,…",
        help="those to convert (default: all that can be)",
    )
    add(
        "--softmax-layers",
        type=int,
        default=0,
        metavar="K",
        help="keep the K that do the most damage as they are",
    )


def _add_training(group: _ArgumentGroup) -> None:
    add = group.add_argument
    add("--transfer-steps", type=int, metavar="N", help="default: 400; 0 for no transfer")
    add("--finetune-steps", type=int, metavar="N", help="default: 400; 0 for no adaptation")
    add(
        "--transfer-lr",
        type=float,
        metavar="RATE",
        help="default: 1e-2, LoLCATs'; short runs want more",
    )
    add("--finetune-lr", type=float, metavar="RATE", help="default: 1e-4")
    add("--batch", type=int, help="sequences per update; default: 8")
    add("--accumulate", type=int, help="parts of a batch, to save memory; default: 1")
    add(
        "--dropout",
        type=float,
        metavar="P",
        help="how often transfer shows a layer without its window; default: 0",
    )
    add(
        "--blockwise",
        action="store_true",
        help="transfer block by block, hidden states on disk: for large models",
    )
    add(
        "--kl",
        type=float,
        metavar="FACTOR",
        help="of KL to the softmax model in adaptation; default: 0",
    )
    add("--bf16", action="store_true", help="matrix products of the training in bfloat16")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--eval-every", type=int, default=100, metavar="STEPS")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--seed", type=int, default=0, help="default: %(default)s")


def _add_generate(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a run, or its model")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=200, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 for the likeliest; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_device(parser)
    parser.set_defaults(act=_generate)


def _add_bench(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="folder of a run, or its model")
    add(
        "--batches",
        type=_numbers,
        default=(1, 4, 16),
        metavar="1,4,…",
        help="sequences at a time; default: 1,4,16",
    )
    add(
        "--tokens",
        type=_numbers,
        default=TOKENS,
        metavar="N,N,…",
        help="to generate; default: powers up to 32768",
    )
    add("--prompt", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    add(
        "--seconds",
        type=float,
        default=600.0,
        help="after which a batch is over; default: %(default)s",
    )
    add(
        "--out",
        type=Path,
        help="JSON file, with a picture beside it (default: bench.json in the folder)",
    )
    add_device(parser)
    parser.set_defaults(act=_bench)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,2,5") from None


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ArgumentTypeError(f"{name!r} is not one of {', '.join(DTYPES)}")
    return name


def _method(chosen: Namespace) -> LinearizationMethod:
    """The named method with what the options change of its analog."""
    method = METHODS[chosen.method]
    given = {
        name: value
        for name in ("features", "rule", "window")
        if (value := getattr(chosen, name)) is not None
    }
    return replace(method, analog=replace(method.analog, **given))


def _with_training_options(method: LinearizationMethod, chosen: Namespace) -> LinearizationMethod:
    """… and of its training."""
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


def _conversion(chosen: Namespace) -> Conversion:
    data = Data(
        tuple(chosen.data),
        tuple(chosen.validation),
        chosen.length,
        chosen.responses,
        not chosen.across,
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


def _plan(chosen: Namespace, console: Console) -> None:
    dtype = None if chosen.dtype is None else DTYPES[chosen.dtype]
    for line in describe_plan(
        plan(chosen.model, _method(chosen), layers=chosen.layers, length=chosen.length, dtype=dtype)
    ):
        console.print(line, markup=False, soft_wrap=True)


def _run(chosen: Namespace, console: Console) -> None:
    told = "finishing the step and saving; once more to stop at once"
    with reporter(console) as watch, StopOnSignal(lambda: watch.note(told)) as stop:
        device = chosen.device.torch()
        complete = run_conversion(
            _conversion(chosen),
            chosen.out,
            until=chosen.until,
            device=device,
            reporter=watch,
            stop=stop,
        )
    shown = {"model": chosen.out / "model", "report": chosen.out / "report" / "report.html"}
    for name, path in shown.items():
        if path.exists():
            console.print(f"{name:<12}{path}", markup=False, soft_wrap=True)
    if not complete:
        console.print("stopped; the same command goes on from here", markup=False)


def _generate(chosen: Namespace, _: Console) -> None:
    model, tokenizer = (
        _load_model(chosen),
        AutoTokenizer.from_pretrained(model_folder(chosen.model)),
    )
    given = tokenizer(chosen.prompt, return_tensors="pt").to(model.device)
    torch.manual_seed(chosen.seed)
    sampling = {"temperature": chosen.temperature} if chosen.temperature else {}
    model.generate(
        **given,
        **sampling,
        do_sample=bool(sampling),
        max_new_tokens=chosen.tokens,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )


def _bench(chosen: Namespace, console: Console) -> None:
    model = _load_model(chosen)
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


def _load_model(chosen: Namespace) -> Any:
    """The linearized model in a folder."""
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder(chosen.model))
    if not isinstance(model, LinearizedModel):
        raise ValueError(
            f"{chosen.model} is a {model.config.model_type}, not a linearized model; convert it"
            " first"
        )
    return model.to(chosen.device.torch()).eval()


def describe_plan(plan: ConversionPlan) -> list[str]:
    """A plan in words."""
    layers = ", ".join(str(site.layer) for site in plan.converted)
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
