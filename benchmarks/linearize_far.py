"""What conversions keep of a teacher that looks far: ``python benchmarks/linearize_far.py
TEACHERS``.

TEACHERS is the folder that benchmarks/linearize_teachers.py has written. First each teacher's need
of distance is measured, with windows in place of its attention; then it is converted by several
methods at equal steps, each a run of its own in TEACHERS/runs that can be stopped and started
again. All figures are on text held out from all trainings, by how far back a token can be recalled
from; they go to benchmarks/results/linearize_far.json, and from there into docs/linearize.md by
`make pages`. A row of the same method, steps and seed is replaced, all others stay.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fastweights.cli.progress import reporter
from fastweights.lab.bench.machine import provenance
from fastweights.linearize import (
    LinearAttentionConfig,
    Mode,
    Student,
    WindowOnly,
    linearize,
    use_mode,
)
from fastweights.linearize.distill.adapt import TokenLoss
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import (
    ADAPT,
    ALIGN,
    TRANSFER,
    LinearizationRecipe,
    StageConfig,
)
from fastweights.linearize.distill.recipe import AdaptationConfig as Adaptation
from fastweights.linearize.distill.recipe import AlignmentConfig as Alignment
from fastweights.linearize.distill.recipe import TransferConfig as Transfer
from fastweights.linearize.distill.trained import AllWeights
from fastweights.linearize.evaluate.far_text import FarText
from fastweights.linearize.evaluate.logits import next_logits
from fastweights.train import AdamW, Every, StopOnSignal
from fastweights.training.data.documents import Data
from fastweights.training.loop.files import atomic_file
from linearize_teachers import SHORT_TEXT

RESULTS = Path(__file__).parent / "results" / "linearize_far.json"
FAR = ("llama", "qwen3")
WINDOWS = (16, 64)
BANDS = {
    "all": (0, math.inf),
    "recalled": (1, math.inf),
    "16-63": (16, 64),
    "64-127": (64, 128),
    "128-255": (128, 256),
    "256-511": (256, 512),
    "512-1023": (512, 1024),
    "1024-2047": (1024, 2048),
}
"""Distances in tokens, the last one not included."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teachers", type=Path)
    parser.add_argument("--only", choices=FAR, action="append", help="this teacher")
    parser.add_argument("--steps", type=int, default=40, help="of each of the two stages")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", action="append", help="this method; may be repeated")
    parser.add_argument("--needs", action="store_true", help="measure the teachers alone")
    chosen = parser.parse_args()
    for name in chosen.only or FAR:
        teacher = chosen.teachers / name / "model"
        text = FarText(**load_file(chosen.teachers / name / "held_out.safetensors"))
        needed = list(needs(teacher, text))
        _record(name, "needs", needed)
        for row in () if chosen.needs else _conversions(chosen, name, text, needed):
            _record(name, "conversions", [*_others(name, row), row])


def needs(teacher: Path, text: FarText) -> Iterator[Row]:
    """What the teacher loses when its attention is only a window, untrained."""
    yield {"window": None, **by_distance(AutoModelForCausalLM.from_pretrained(teacher), text)}
    for window in WINDOWS:
        model = AutoModelForCausalLM.from_pretrained(teacher)
        model = linearize(model, LinearAttentionConfig(window=window))
        yield {"window": window, **by_distance(model, text, WindowOnly())}


@torch.no_grad()
def by_distance(model: Any, text: FarText, mode: Mode | None = None) -> dict[str, Row]:
    """Tokens, nats per token and accuracy of the next token, in each band of distances in which
    there are any."""
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
        if chosen.any()
    }


def conversions(
    teacher: Path, far: Path, steps: int, batch: int, seed: int = 0
) -> dict[str, Conversion]:
    """LoLCATs, with one thing changed at a time, and students that are aligned by hidden states
    and learn from the teacher's logits, on the teacher's own kind of text."""
    data = Data(
        (str(far / "train.jsonl"),),
        (str(far / "validation.jsonl"),),
        length=SHORT_TEXT.length,
        boundaries=False,
        held_out=1 << 12,
        stream=1 << 16,
    )
    every = Every(log=10, evaluation=1 << 20, checkpoint=25)

    def fit(base: Fit, **changes: Any) -> Fit:
        return replace(base, **{"steps": steps, "batch": batch, "every": every, **changes})

    published, published_next = Transfer(fit=fit(TRANSFER)), Adaptation(fit=fit(ADAPT))
    fast = Transfer(fit=fit(TRANSFER, optimizer=_adam(1e-1)))
    longer = fast.with_fit(fit(fast.fit, steps=3 * steps))
    adapt = Adaptation(fit=fit(ADAPT, optimizer=_adam(1e-3)))
    align = Alignment(fit=fit(ALIGN, optimizer=_adam(3e-3)))
    distil = Adaptation(
        AllWeights(), TokenLoss(ce=0.0, kl=1.0), fit(ADAPT, optimizer=_adam(1e-3)), name="kl"
    )
    narrow, wide = (LinearAttentionConfig(window=window) for window in WINDOWS)

    def of(analog: LinearAttentionConfig, *stages: StageConfig) -> Conversion:
        return Conversion(str(teacher), data, LinearizationRecipe(analog, stages), seed=seed)

    first = of(narrow, fast, adapt)
    by_kl = replace(adapt, loss=TokenLoss(kl=1.0))
    delta = replace(wide, rule="gated_deltanet")
    return {
        "rates 1e-1, 1e-3": first,
        "dropout 0.5": of(narrow, replace(fast, dropout=0.5), adapt),
        "1 softmax layer": replace(first, softmax_layers=1),
        "KL 1": of(narrow, fast, by_kl),
        "published rates": of(narrow, published, published_next),
        "window 64": of(wide, fast, adapt),
        "3 × transfer": of(narrow, longer, adapt),
        "LoLCATs aligned, KL": of(wide, align, distil),
        "delta, KL": of(delta, align, distil),
        "delta 256, KL": of(replace(delta, feature_dim=128), align, distil),
        "delta 512, KL": of(replace(delta, feature_dim=256), align, distil),
        "delta 256 alone, KL": of(replace(delta, feature_dim=128, window=0), align, distil),
        "delta 256, 1 softmax layer, KL": replace(
            of(replace(delta, feature_dim=128), align, distil), softmax_layers=1
        ),
    }


def _adam(lr: float) -> AdamW:
    return AdamW(lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


def _conversions(
    chosen: argparse.Namespace, name: str, text: FarText, needed: list[Row]
) -> Iterator[Row]:
    teacher = chosen.teachers / name / "model"
    attending = {row["window"]: row for row in needed}
    console = Console(highlight=False)
    found = conversions(teacher, chosen.teachers / "far", chosen.steps, chosen.batch, chosen.seed)
    for title in chosen.method or found:
        conversion = found[title]
        console.print(f"\n{name}: {title}", markup=False)
        folder = f"{title} {chosen.steps} {chosen.seed}"
        out = chosen.teachers / "runs" / name / "".join(c if c.isalnum() else "-" for c in folder)
        with reporter(console) as watch, StopOnSignal() as stop:
            start = time.perf_counter()
            if not run_conversion(conversion, out, reporter=watch, stop=stop):
                raise SystemExit("stopped; the same command goes on from here")
            seconds = time.perf_counter() - start
        yield {
            "method": title,
            "steps": chosen.steps,
            "seed": chosen.seed,
            "seconds": seconds,
            **_measured(conversion, out, text, attending),
        }


def _measured(
    conversion: Conversion, out: Path, text: FarText, attending: Mapping[int | None, Row]
) -> Row:
    """A run's shares and tokens; without a window, those of what the teacher's of 64 leaves."""
    recipe = conversion.recipe
    model, window = AutoModelForCausalLM.from_pretrained(out / "model"), recipe.analog.window
    teacher_window = attending[window or WINDOWS[-1]]
    alone = by_distance(model, text, WindowOnly()) if window else teacher_window
    tokens = {
        name: sum(stage.fit.steps * stage.fit.batch for stage in stages) * FAR_LENGTH
        for name, stages in (("transfer", recipe.by_layer), ("finetune", recipe.whole))
    }
    return {
        "window": window,
        "transfer_tokens": tokens["transfer"],
        "finetune_tokens": tokens["finetune"],
        "recall": json.loads((out / "evaluation.json").read_text())["recall"],
        **_shares(attending[None], by_distance(model, text, Student()), alone, teacher_window),
    }


def _others(teacher: str, row: Row) -> list[Row]:
    """The rows that are recorded of other conversions, steps or seeds."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = results.get(teacher, {}).get("conversions", {"rows": []})["rows"]
    same = ("method", "steps", "seed")
    return [old for old in rows if any(old.get(name) != row[name] for name in same)]


def _shares(softmax: Row, converted: Row, window_only: Row, teacher_window: Row) -> Row:
    """How much the linear side closes of what is open without it, and of what the teacher's window
    alone leaves open, which is more where layers stay softmax.
    """

    def share(window: Row, band: str) -> float:
        open_ones = window[band]["nats"] - softmax[band]["nats"]
        return (window[band]["nats"] - converted[band]["nats"]) / open_ones

    return {
        "softmax": softmax,
        "converted": converted,
        "window only": window_only,
        "share": {band: share(window_only, band) for band in softmax},
        "share of the teacher's window": {band: share(teacher_window, band) for band in softmax},
    }


def _record(teacher: str, part: str, rows: list[Row]) -> None:
    """Put rows into the file of results, beside what was measured before."""
    results: Mapping[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = {**results.get(teacher, {}), part: {**provenance(), "rows": rows}}
    with atomic_file(RESULTS) as new:
        new.write_text(json.dumps({**results, teacher: parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
