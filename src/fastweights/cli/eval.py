"""fastweights eval"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from fastweights.cli.arguments import add_device, add_plugins
from fastweights.lab.evals.items import SOURCES, Item, recall_prompts
from fastweights.lab.evals.score import Scores, score
from fastweights.models import FastWeightsForCausalLM
from fastweights.render.docstrings import first_paragraph
from fastweights.render.plots import png
from fastweights.runs.checkpoint import model_folder, no_progress_bars
from fastweights.runs.files import atomic_file
from fastweights.text.corpus import tokenize_sources
from fastweights.train.perplexity import PositionLoss, draw, nll_by_position

METRICS = ("accuracy", "accuracy_per_token", "accuracy_per_character", "nll")
Evaluation = Callable[[Namespace, Console], None]


def eval_(parser: ArgumentParser) -> Evaluation:
    """Measure language models: loss by position, multiple choice, last words, in-context recall."""
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    for name, declare in {"perplexity": _perplexity, "tasks": _tasks, "harness": _harness}.items():
        summary = first_paragraph(declare) or name
        kind = kinds.add_parser(name, help=summary, description=summary)
        kind.add_argument(
            "models",
            nargs="+",
            metavar="MODEL",
            help="a run, a checkpoint or model folder, or a hub name",
        )
        kind.add_argument(
            "--out",
            type=Path,
            default=Path("runs/eval") / name,
            help="folder (default: %(default)s)",
        )
        kind.add_argument(
            "--batch", type=int, default=8, help="sequences at once (default: %(default)s)"
        )
        add_plugins(kind)
        add_device(kind)
        kind.set_defaults(evaluate=declare(kind))
    return _eval


def _eval(chosen: Namespace, console: Console) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    chosen.evaluate(chosen, console)
    console.print(f"{chosen.out}", markup=False, soft_wrap=True)


def _perplexity(parser: ArgumentParser) -> Evaluation:
    """Loss by token position on text, with the state carried past the length of training."""
    parser.add_argument(
        "--text", nargs="+", required=True, metavar="SOURCE", help="as `fastweights train --data`"
    )
    parser.add_argument(
        "--length", type=int, default=1024, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk", type=int, default=512, help="tokens fed at once; 0: whole (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, help="of the text, at most (default: all)")
    parser.add_argument(
        "--trained",
        type=int,
        metavar="LENGTH",
        help="the length of training, to mark in the picture",
    )
    parser.add_argument(
        "--reference", metavar="MODEL", help="one of the models; draw the differences to it"
    )
    return _measure_perplexity


def _measure_perplexity(chosen: Namespace, console: Console) -> None:
    if chosen.reference not in (None, *chosen.models):
        raise ValueError(
            f"--reference {chosen.reference} is none of the models; name it among them too"
        )
    losses: dict[str, PositionLoss] = {}
    table = Table("model", "tokens", "perplexity", "nats/token", "bits/byte", box=box.SIMPLE_HEAD)
    for source in chosen.models:
        loss = losses[source] = _read_text(chosen, source)
        loss.save(chosen.out / f"{_file_name(source)}.json")
        bits = "" if loss.bits_per_byte is None else f"{loss.bits_per_byte:.4f}"
        table.add_row(
            source, f"{loss.counts.sum():,}", f"{loss.perplexity:.4f}", f"{loss.mean:.4f}", bits
        )
    with atomic_file(chosen.out / "positions.png") as new:
        new.write_bytes(png(draw(losses, chosen.reference, chosen.trained)))
    console.print(table)


def _read_text(chosen: Namespace, source: str) -> PositionLoss:
    model, tokenizer = _load_model(source, chosen.device.torch())
    tokens, size = tokenize_sources(chosen.text, tokenizer)
    return nll_by_position(
        model,
        tokens[: chosen.tokens],
        chosen.length,
        batch=chosen.batch,
        chunk=chosen.chunk or None,
        tokens_per_byte=size.tokens_per_byte,
    )


def _tasks(parser: ArgumentParser) -> Evaluation:
    """Multiple choice, last words, word scrambling and recall, on published files."""
    _add_items(parser)
    return _measure_tasks


def _measure_tasks(chosen: Namespace, console: Console) -> None:
    tasks = _items(chosen)
    for source in chosen.models:
        columns = ("task", "items", "accuracy", "per token", "per character", "nats")
        table = Table(*columns, title=source, box=box.SIMPLE_HEAD)
        model, tokenizer = _load_model(source, chosen.device.torch())
        results = {
            name: score(model, tokenizer, items, batch=chosen.batch)
            for name, items in tasks.items()
        }
        _write(
            chosen.out / f"{_file_name(source)}.json",
            {name: asdict(one) for name, one in results.items()},
        )
        for name, one in results.items():
            table.add_row(name, str(len(one.rows)), *(_cell(one, metric) for metric in METRICS))
        console.print(table)


def _cell(scores: Scores, metric: str) -> str:
    if metric not in scores.metrics:
        return ""
    return f"{scores.metrics[metric]:.3f} ± {scores.errors[metric]:.3f}"


def _harness(parser: ArgumentParser) -> Evaluation:
    """The same items by lm-evaluation-harness, as tasks of its own that need no network."""
    _add_items(parser)
    return _measure_harness


def _measure_harness(chosen: Namespace, console: Console) -> None:
    try:
        from fastweights.lab.evals import harness
    except ImportError as error:
        raise ValueError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'fastweights[eval]'"
        ) from error
    tasks = _items(chosen)
    harness.export(tasks, chosen.out / "tasks")
    table = Table("model", "task", "metric", "value", box=box.SIMPLE_HEAD)
    for source in chosen.models:
        model, tokenizer = _load_model(source, chosen.device.torch())
        if not isinstance(model, FastWeightsForCausalLM):
            raise ValueError(
                f"{source} is a {type(model).__name__}; run lm-eval with --include_path"
                f" {chosen.out}/tasks"
            )
        results = harness.run_harness(
            model, tokenizer, chosen.out / "tasks", tasks, batch=chosen.batch
        )
        _write(
            chosen.out / f"{_file_name(source)}.json",
            {name: results[name] for name in ("results", "samples")},
        )
        for name, found in results["results"].items():
            for metric, value in found.items():
                if isinstance(value, float) and "stderr" not in metric:
                    table.add_row(source, name, metric.removesuffix(",none"), f"{value:.4f}")
    console.print(table)


def _add_items(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="of the evaluation files"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(SOURCES)}, or a file .jsonl of recall",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="items per task, the first ones (default: all)"
    )
    parser.add_argument(
        "--shots",
        type=int,
        default=0,
        metavar="N",
        help="solved words before a scrambled one (default: 0)",
    )


def _items(chosen: Namespace) -> dict[str, Sequence[Item]]:
    return {Path(name).stem: _of(name, chosen) for name in chosen.tasks or SOURCES}


def _of(name: str, chosen: Namespace) -> Sequence[Item]:
    if name not in SOURCES and not Path(name).is_file():
        raise ValueError(
            f"no task is called {name!r}; there are {', '.join(SOURCES)}, and files of recall"
        )
    items = (
        SOURCES[name].items(chosen.data, chosen.shots)
        if name in SOURCES
        else recall_prompts(Path(name))
    )
    return items[: chosen.limit]


def _load_model(
    source: str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    folder = model_folder(Path(source)) if Path(source).exists() else source
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def _file_name(source: str) -> str:
    return source.strip("/").replace("/", "-")


def _write(path: Path, content: Any) -> None:
    with atomic_file(path) as new:
        new.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
