"""fastweights eval"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fastweights.cli.load import load_config, load_model, rounded_bits
from fastweights.cli.progress import reporter
from fastweights.environment import require_package
from fastweights.lab.evals import needles
from fastweights.lab.evals.items import SOURCES, Item, recall_prompts
from fastweights.lab.evals.score import Scores, score
from fastweights.linearize.convert.rotary import positions_of
from fastweights.training.data.corpus import tokenize_sources
from fastweights.training.data.sources import read_documents
from fastweights.training.language.perplexity import PositionLoss, draw, nll_by_position
from fastweights.training.loop.files import write_figure, write_json
from fastweights.training.loop.report import Follow, follow

HAY_CHARACTERS = 1 << 24
"""Of a text that numbers are hidden among, the first ones, and the rest of their piece."""
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
        loss = losses[source] = _read_text(chosen, source, console)
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


def _read_text(chosen: Namespace, source: str, console: Console) -> PositionLoss:
    model, tokenizer = load_model(source, chosen.device.torch(), bits=rounded_bits(chosen))
    tokens, size = tokenize_sources(chosen.text, tokenizer, chosen.field, chosen.tokens)
    with _following(console, source) as follow:
        return nll_by_position(
            model,
            tokens,
            chosen.length,
            batch=chosen.batch,
            chunk=chosen.chunk or None,
            tokens_per_byte=size.tokens_per_byte,
            follow=follow,
        )


@contextmanager
def _following(console: Console, name: str) -> Iterator[Follow]:
    """Show how far work on a model or a task has come."""
    with reporter(console) as shown:
        yield lambda pieces, what: follow(pieces, f"{name}: {what}", shown)


def measure_tasks(chosen: Namespace, console: Console) -> None:
    """Scores on published files."""
    tasks = _items(chosen)
    for source in chosen.models:
        columns = ("task", "items", "accuracy", "per token", "per character", "nats")
        table = Table(*columns, title=source, box=box.SIMPLE_HEAD)
        model, tokenizer = load_model(source, chosen.device.torch(), bits=rounded_bits(chosen))
        results = dict[str, Scores]()
        for name, items in tasks.items():
            with _following(console, name) as follow:
                results[name] = score(model, tokenizer, items, batch=chosen.batch, follow=follow)
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
        model, tokenizer = load_model(source, chosen.device.torch(), bits=rounded_bits(chosen))
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


def measure_needles(chosen: Namespace, console: Console) -> None:
    """How often hidden numbers are found, as tables and as a picture."""
    grid = needles.NeedleGrid(chosen.lengths, chosen.depths, chosen.repeats, chosen.seed)
    text = None if chosen.text is None else _text_of(chosen)
    scores = dict[str, needles.NeedleScores]()
    for source in chosen.models:
        _say_positions(source, grid.lengths[-1], console)
        model, tokenizer = load_model(source, chosen.device.torch(), bits=rounded_bits(chosen))
        with _following(console, source) as follow:
            one = scores[source] = needles.measure_needles(
                model, tokenizer, grid, text, batch=chosen.batch, follow=follow
            )
        _write(chosen, source, one.record())
        console.print(_needle_table(source, one))
    write_figure(chosen.out / "needles.png", needles.draw(scores))
    _say_where(chosen, console)


def _text_of(chosen: Namespace) -> str:
    found, length = list[str](), 0
    for document in read_documents(chosen.text, field=chosen.field):
        for piece in document:
            found.append(piece.text)
            length += len(piece.text)
            if length >= HAY_CHARACTERS:
                return "".join(found)
        found.append("\n")
    return "".join(found)


def _say_positions(source: str, length: int, console: Console) -> None:
    positions = positions_of(load_config(source))
    if positions is not None and positions < length:
        console.print(
            f"{source} was made for {positions:,} positions: longer texts are beyond them",
            soft_wrap=True,
        )


def _needle_table(source: str, scores: needles.NeedleScores) -> Table:
    depths = [f"{depth:.0%} deep" for depth in scores.grid.places]
    table = Table("tokens", *depths, "mean", title=source, box=box.SIMPLE_HEAD)
    for length, row in zip(scores.grid.lengths, scores.accuracy, strict=True):
        table.add_row(f"{length:,}", *(f"{cell:.0%}" for cell in row), f"{row.mean():.0%}")
    table.caption = f"mean {scores.mean:.1%}, long texts weighing more {scores.weighted_mean:.1%}"
    return table


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
