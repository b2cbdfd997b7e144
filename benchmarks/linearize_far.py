"""How far the teachers look: ``python benchmarks/linearize_far.py TEACHERS``.

TEACHERS is the folder that benchmarks/linearize_teachers.py has written. Each teacher's need of
distance is measured on text held out from all trainings, with windows in place of its attention, by
how far back a token can be recalled from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fastweights.lab.bench.report import open_report
from fastweights.linearize import LinearAttentionConfig, Mode, WindowOnly, linearize, use_mode
from fastweights.linearize.evaluate.far_text import FarText
from fastweights.linearize.evaluate.logits import next_logits
from measuring import options

FAR = ("llama", "qwen3")
WINDOWS = (None, 16, 64)
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
    parser = options(__doc__, "linearize_far")
    parser.add_argument("teachers", type=Path)
    chosen = parser.parse_args()
    report = open_report("linearize_far", chosen.out)
    for name in FAR:
        if not report.has(name):
            report.add(name, [need(chosen.teachers / name, window) for window in WINDOWS])


def need(teacher: Path, window: int | None) -> Row:
    """What a teacher loses when its attention is only a window, untrained."""
    text = FarText(**load_file(teacher / "held_out.safetensors"))
    model, mode = AutoModelForCausalLM.from_pretrained(teacher / "model"), None
    if window is not None:
        model, mode = linearize(model, LinearAttentionConfig(window=window)), WindowOnly()
    return {"window": window, **by_distance(model, text, mode)}


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


def recall(model: Any, text: FarText, mode: Mode | None = None) -> dict[str, float]:
    """The accuracy of the next token in each of these bands."""
    found = by_distance(model, text, mode)
    return {band: row["accuracy"] for band, row in found.items()}


if __name__ == "__main__":
    main()
