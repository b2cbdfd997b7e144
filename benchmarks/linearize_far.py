"""What conversions keep of a teacher that looks far: ``python benchmarks/linearize_far.py
TEACHERS``.

TEACHERS is the folder that benchmarks/linearize_teachers.py has written. First each teacher's need
of distance is measured, with windows in place of its attention; then it is converted by several
methods at equal steps, each a run of its own in TEACHERS/runs that can be stopped and started
again. All figures are on text held out from all trainings, by how far back a token can be recalled
from; they go to benchmarks/results/linearize_far.json, and from there into docs/linearize.md by
`make pages`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from fastweights.linearize.distill.methods import ADAPT, TRANSFER, LinearizationMethod
from fastweights.linearize.distill.methods import AdaptationConfig as Adaptation
from fastweights.linearize.distill.methods import TransferConfig as Transfer
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fastweights.cli.progress import reporter
from fastweights.lab.bench.machine import Machine, commit, versions
from fastweights.linearize import (
    LinearAttentionConfig,
    Mode,
    Student,
    WindowOnly,
    linearize,
    use_mode,
)
from fastweights.linearize.distill.adapt import TokenLoss, next_logits
from fastweights.linearize.distill.far_text import FarText
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.runs.files import atomic_file
from fastweights.text.documents import Data
from fastweights.train import AdamW, Every, StopOnSignal
from linearize_teachers import FAR, FAR_LENGTH

RESULTS = Path(__file__).parent / "results" / "linearize_far.json"
WINDOWS = (16, 64)
BANDS = {
    "all": (0, FAR_LENGTH),
    "recalled": (1, FAR_LENGTH),
    "16-63": (16, 64),
    "64-127": (64, 128),
    "128-255": (128, 256),
    "256-511": (256, 512),
}
"""Distances in tokens, the last one not included."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teachers", type=Path)
    parser.add_argument("--only", choices=FAR, action="append", help="this teacher")
    parser.add_argument("--steps", type=int, default=40, help="of each of the two stages")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--needs", action="store_true", help="measure the teachers alone")
    chosen = parser.parse_args()
    for name in chosen.only or FAR:
        teacher = chosen.teachers / name / "model"
        text = FarText(**load_file(chosen.teachers / name / "held_out.safetensors"))
        needed = list(needs(teacher, text))
        _record(name, "needs", needed)
        found: list[Row] = []
        for row in () if chosen.needs else _conversions(chosen, name, text, needed):
            found.append(row)
            _record(name, "conversions", found)


def needs(teacher: Path, text: FarText) -> Iterator[Row]:
    """What the teacher loses when its attention is only a window, untrained."""
    yield {"window": None, **by_distance(AutoModelForCausalLM.from_pretrained(teacher), text)}
    for window in WINDOWS:
        model = AutoModelForCausalLM.from_pretrained(teacher)
        model = linearize(model, LinearAttentionConfig(window=window))
        yield {"window": window, **by_distance(model, text, WindowOnly())}


@torch.no_grad()
def by_distance(model: Any, text: FarText, mode: Mode | None = None) -> dict[str, Row]:
    """Tokens, nats per token and accuracy of the next token, in each band of distances."""
    nats, right = [], []
    for ids in text.tokens.split(4):
        if mode is None:
            logits = next_logits(model.eval(), {"input_ids": ids})
        else:
            with use_mode(model.eval(), mode):
                logits = next_logits(model, {"input_ids": ids})
        nats.append(F.cross_entropy(logits.mT, ids[:, 1:], reduction="none"))
        right.append(logits.argmax(-1) == ids[:, 1:])
    distance, losses, hits = text.distance[:, 1:], torch.cat(nats), torch.cat(right)
    inside = {name: (distance >= low) & (distance < high) for name, (low, high) in BANDS.items()}
    return {
        name: {
            "tokens": int(chosen.sum()),
            "nats": float(losses[chosen].mean()),
            "accuracy": float(hits[chosen].float().mean()),
        }
        for name, chosen in inside.items()
    }


def conversions(teacher: Path, far: Path, steps: int, batch: int) -> dict[str, Conversion]:
    """LoLCATs, with one thing changed at a time, on the teacher's own kind of text."""
    data = Data(
        (str(far / "train.jsonl"),),
        (str(far / "validation.jsonl"),),
        length=FAR_LENGTH,
        boundaries=False,
        held_out=1 << 12,
        stream=1 << 16,
    )
    every = Every(log=10, evaluation=1 << 20, checkpoint=25)
    published = Transfer(fit=replace(TRANSFER, steps=steps, batch=batch, every=every))
    published_next = Adaptation(fit=replace(ADAPT, steps=steps, batch=batch, every=every))
    fast = replace(published, fit=replace(published.fit, optimizer=_adam(1e-1)))
    longer = replace(fast, fit=replace(fast.fit, steps=3 * steps))
    adapt = replace(published_next, fit=replace(published_next.fit, optimizer=_adam(1e-3)))
    narrow, wide = (LinearAttentionConfig(window=window) for window in WINDOWS)
    first = Conversion(str(teacher), data, LinearizationMethod(narrow, fast, adapt))

    def changed(**fields: Any) -> Conversion:
        return replace(first, method=replace(first.method, **fields))

    return {
        "rates 1e-1, 1e-3": first,
        "dropout 0.5": changed(transfer=replace(fast, dropout=0.5)),
        "1 softmax layer": replace(first, softmax_layers=1),
        "KL 1": changed(adapt=replace(adapt, loss=TokenLoss(kl=1.0))),
        "published rates": changed(transfer=published, adapt=published_next),
        "window 64": changed(analog=wide),
        "3 × transfer": changed(transfer=longer),
    }


def _adam(lr: float) -> AdamW:
    return AdamW(lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


def _conversions(
    chosen: argparse.Namespace, name: str, text: FarText, needed: list[Row]
) -> Iterator[Row]:
    teacher = chosen.teachers / name / "model"
    attending = {row["window"]: row for row in needed}
    console = Console(highlight=False)
    found = conversions(teacher, chosen.teachers / "far", chosen.steps, chosen.batch)
    for title, conversion in found.items():
        console.print(f"\n{name}: {title}", markup=False)
        out = chosen.teachers / "runs" / name / "".join(c if c.isalnum() else "-" for c in title)
        with reporter(console) as watch, StopOnSignal() as stop:
            if not run_conversion(conversion, out, reporter=watch, stop=stop):
                raise SystemExit("stopped; the same command goes on from here")
        model = AutoModelForCausalLM.from_pretrained(out / "model")
        window = conversion.method.analog.window
        tokens = chosen.batch * FAR_LENGTH
        stages = {"transfer": conversion.method.transfer, "finetune": conversion.method.adapt}
        yield {
            "method": title,
            "window": window,
            **{
                f"{stage}_tokens": 0 if config is None else tokens * config.fit.steps
                for stage, config in stages.items()
            },
            **_shares(
                attending[None],
                by_distance(model, text, Student()),
                by_distance(model, text, WindowOnly()),
                attending[window],
            ),
        }


def _shares(softmax: Row, converted: Row, window_only: Row, teacher_window: Row) -> Row:
    """How much the linear side closes of what is open without it, and of what the teacher's window
    alone leaves open, which is more where layers stay softmax.
    """

    def share(window: Row, band: str) -> float:
        open_ones = window[band]["nats"] - softmax[band]["nats"]
        return (window[band]["nats"] - converted[band]["nats"]) / open_ones

    return {
        "softmax": {band: softmax[band] for band in BANDS},
        "converted": converted,
        "window only": window_only,
        "share": {band: share(window_only, band) for band in BANDS},
        "share of the teacher's window": {band: share(teacher_window, band) for band in BANDS},
    }


def _record(teacher: str, part: str, rows: list[Row]) -> None:
    """Put rows into the file of results, beside what was measured before."""
    results: Mapping[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    header = {
        "commit": commit(),
        "machine": asdict(Machine.here(torch.device("cpu"))),
        "versions": versions(),
    }
    parts = {**results.get(teacher, {}), part: {**header, "rows": rows}}
    with atomic_file(RESULTS) as new:
        new.write_text(json.dumps({**results, teacher: parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
