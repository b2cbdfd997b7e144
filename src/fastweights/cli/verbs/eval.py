"""fastweights eval"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fastweights.cli.load import load_model
from fastweights.environment import require_package
from fastweights.lab.evals.items import SOURCES, Item, recall_prompts
from fastweights.lab.evals.score import Scores, score
from fastweights.training.data.corpus import tokenize_sources
from fastweights.training.language.perplexity import PositionLoss, draw, nll_by_position
from fastweights.training.loop.files import write_figure, write_json

METRICS = ("accuracy", "accuracy_per_token", "accuracy_per_character", "nll")


def measure_perplexity(chosen: Namespace, console: Console) -> None:
    """Loss by token position, as numbers and as a picture."""
    if chosen.reference not in (None, *chosen.models):
        raise ValueError(
            f"--reference {chosen.reference} is not among the models; name it there too"
        )
    losses: dict[str, PositionLoss] = {}
    table = Table("model", "tokens", "perplexity", "nats/token", "bits/byte", box=box.SIMPLE_HEAD)
    for source in chosen.models:
        loss = losses[source] = _read_text(chosen, source)
        chosen.out.mkdir(parents=True, exist_ok=True)
        loss.save(chosen.out / f"{_file_name(source)}.json")
        bits = "" if loss.bits_per_byte is None else f"{loss.bits_per_byte:.4f}"
        table.add_row(
            source, f"{loss.counts.sum():,}", f"{loss.perplexity:.4f}", f"{loss.mean:.4f}", bits
        )
    picture = draw(losses, chosen.reference, chosen.trained)
    write_figure(chosen.out / "positions.png", picture)
    console.print(table)
    _say_where(chosen, console)


def _read_text(chosen: Namespace, source: str) -> PositionLoss:
    model, tokenizer = load_model(source, chosen.device.torch(), int8=chosen.int8)
    tokens, size = tokenize_sources(chosen.text, tokenizer, chosen.field, chosen.tokens)
    return nll_by_position(
        model,
        tokens,
        chosen.length,
        batch=chosen.batch,
        chunk=chosen.chunk or None,
        tokens_per_byte=size.tokens_per_byte,
    )


def measure_tasks(chosen: Namespace, console: Console) -> None:
    """Scores on published files."""
    tasks = _items(chosen)
    for source in chosen.models:
        columns = ("task", "items", "accuracy", "per token", "per character", "nats")
        table = Table(*columns, title=source, box=box.SIMPLE_HEAD)
        model, tokenizer = load_model(source, chosen.device.torch(), int8=chosen.int8)
        results = {
            name: score(model, tokenizer, items, batch=chosen.batch)
            for name, items in tasks.items()
        }
        _write(chosen, source, {name: asdict(one) for name, one in results.items()})
        for name, one in results.items():
            table.add_row(name, str(len(one.rows)), *(_cell(one, metric) for metric in METRICS))
        console.print(table)
    _say_where(chosen, console)


def _cell(scores: Scores, metric: str) -> str:
    if metric not in scores.metrics:
        return ""
    return f"{scores.metrics[metric]:.3f} ± {scores.errors[metric]:.3f}"


def measure_harness(chosen: Namespace, console: Console) -> None:
    """Scores on the same files by lm-evaluation-harness."""
    require_package(
        "lm_eval", "lm-evaluation-harness", "or score the tasks by `fastweights eval tasks`"
    )
    from fastweights.lab.evals import harness

    tasks = _items(chosen)
    table = Table("model", "task", "metric", "value", box=box.SIMPLE_HEAD)
    for source in chosen.models:
        harness.export(tasks, chosen.out / "tasks")
        model, tokenizer = load_model(source, chosen.device.torch(), int8=chosen.int8)
        results = harness.run_harness(
            model, tokenizer, chosen.out / "tasks", tasks, batch=chosen.batch
        )
        _write(chosen, source, {name: results[name] for name in ("results", "samples")})
        for name, found in results["results"].items():
            for metric, value in found.items():
                if isinstance(value, float) and "stderr" not in metric:
                    table.add_row(source, name, metric.removesuffix(",none"), f"{value:.4f}")
    console.print(table)
    _say_where(chosen, console)


def _items(chosen: Namespace) -> dict[str, Sequence[Item]]:
    return {Path(name).stem: _of(name, chosen) for name in chosen.tasks or SOURCES}


def _of(name: str, chosen: Namespace) -> Sequence[Item]:
    if name not in SOURCES and not Path(name).is_file():
        raise ValueError(
            f"no task is called {name!r}; there are {', '.join(SOURCES)}, and .jsonl files of"
            " recall prompts"
        )
    items = (
        SOURCES[name].items(chosen.data, chosen.shots)
        if name in SOURCES
        else recall_prompts(Path(name))
    )
    if not items:
        raise ValueError(
            f"{name} has no items to score (of scrambled words, those after the --shots are scored)"
        )
    return items[: chosen.limit]


def _say_where(chosen: Namespace, console: Console) -> None:
    console.print(f"{chosen.out}", soft_wrap=True)


def _file_name(source: str) -> str:
    return source.strip("/").replace("/", "-")


def _write(chosen: Namespace, source: str, content: Any) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_json(chosen.out / f"{_file_name(source)}.json", content)
