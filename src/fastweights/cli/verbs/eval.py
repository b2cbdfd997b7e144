"""fastweights eval"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fastweights.cli.load import load_config, load_model, model_identity, rounded_bits
from fastweights.cli.progress import reporter
from fastweights.environment import require_package
from fastweights.lab.evals import needles, suite_scores
from fastweights.lab.evals.items import SOURCES, Item, recall_prompts
from fastweights.lab.evals.score import Scores, score
from fastweights.lab.evals.suite_journal import SuiteJournal
from fastweights.lab.evals.suites import SUITES, Suite, TableColumn
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
    """Scores on a paper's suite by lm-evaluation-harness, as a table and as a picture."""
    require_package(
        "lm_eval", "lm-evaluation-harness", "or score the tasks by `fastweights eval tasks`"
    )
    suite = _suite(chosen)
    from fastweights.lab.evals import harness, harness_tasks

    if chosen.data is not None and not chosen.data.is_dir():
        raise ValueError(f"there is no folder {chosen.data}; give one of evaluation files, or none")
    loaded = harness_tasks.load_tasks(suite.columns, chosen.data)
    items = sum(task.items(chosen.limit) for task in loaded)
    console.print(f"{suite.source}: {items:,} items of {len(loaded)} tasks", soft_wrap=True)
    scores = dict[str, suite_scores.SuiteScores]()
    for source in chosen.models:
        model, tokenizer = load_model(source, chosen.device.torch(), bits=rounded_bits(chosen))
        how = {"limit": chosen.limit, "batch": chosen.batch, "seed": chosen.seed}
        finished = chosen.out / f"{_file_name(source)}.parts.jsonl"
        journal = SuiteJournal(finished, model_identity(source, rounded_bits(chosen)))
        with _following(console, source) as follow:
            one = harness.score_suite(
                model, tokenizer, suite, loaded, **how, follow=follow, journal=journal
            )
        scores[source] = one
        _write(chosen, source, {**one.record(), **how})
    console.print(_suite_table(suite, scores))
    for column, reason in suite.absent.items():
        console.print(f"{column} is not scored: {reason}", soft_wrap=True)
    for note in suite.notes:
        console.print(f"note: {note}", soft_wrap=True)
    write_figure(chosen.out / "suite.png", suite_scores.draw(scores))
    _say_where(chosen, console)


def _suite(chosen: Namespace) -> Suite:
    """What is asked for, with what is asked for in place of the paper's."""
    if chosen.suite is None and chosen.tasks is None:
        raise ValueError(f"give --suite, one of {', '.join(SUITES)}, or --tasks of the harness")
    if chosen.suite is None:
        columns = tuple(TableColumn(name, name, None) for name in dict.fromkeys(chosen.tasks))
        suite = Suite("lm-evaluation-harness", columns)
    else:
        suite = SUITES[chosen.suite]
        tasks = {column.task for column in suite.columns}
        if unknown := set(chosen.tasks or ()) - tasks:
            raise ValueError(
                f"--suite {chosen.suite} has no task {', '.join(sorted(unknown))}; it has"
                f" {', '.join(sorted(tasks))}"
            )
        wanted = tasks.intersection(chosen.tasks or tasks)
        suite = replace(suite, columns=tuple(c for c in suite.columns if c.task in wanted))
    if chosen.shots is not None:
        columns = tuple(replace(column, shots=chosen.shots) for column in suite.columns)
        suite = replace(suite, columns=columns)
    if chosen.prefixes is None:
        return suite
    if not any(shots for column in suite.columns for shots in column.shots):
        raise ValueError("--prefixes are of solved examples, and there are none; give --shots")
    return replace(suite, prefixes=chosen.prefixes)


def _suite_table(suite: Suite, scores: Mapping[str, suite_scores.SuiteScores]) -> Table:
    table = Table("column", "metric", "shots", title=suite.source, box=box.SIMPLE_HEAD)
    for name in scores:
        table.add_column(name, justify="right")
    for row in zip(*(one.scores for one in scores.values()), strict=True):
        table.add_row(row[0].column, row[0].metric, f"{row[0].shots}", *(one.shown for one in row))
    for name in next(iter(scores.values())).averages:
        means = (f"{100 * one.averages[name]:.2f}" for one in scores.values())
        table.add_row(name, "", "", *means)
    return table


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
