"""Tokens per second of a pretrained model: transformers, patched, imported, linearized; in turns.

    python benchmarks/decoding.py SMOLLM2
    python benchmarks/decoding.py SMOLLM2 --contexts 512 --sequences 2 4 8 --out several.json

`SMOLLM2` is a folder of a model that has an importer. One sequence or several, after prompts of
several lengths: milliseconds per token of each, the least and the median of `--rounds` tokens,
which all contenders but the patched one read in turn, and tokens per second, of all sequences
together, of the least. "imported, modules"
is the imported model without `NativeStep`. The linearized one (window of 64) is not trained, which
takes as long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastweights import patch_transformers
from fastweights.generate import Decoder
from fastweights.importers import import_model
from fastweights.lab.bench.report import open_report
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.models import quantize
from measuring import options

CONTEXTS = (64, 512, 2048)
WINDOW = 64
THEIRS = "transformers"
Model = Any
Read = Callable[[Decoder, Tensor], Tensor]


def by_step(decoder: Decoder, token: Tensor) -> Tensor:
    return decoder.read_token(token)


def by_modules(decoder: Decoder, token: Tensor) -> Tensor:
    return decoder.read(token[:, None])


def contenders(folder: Path) -> dict[str, tuple[Model, Read]]:
    """Models by name, and what reads a token of theirs."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = import_model(theirs).eval()
    linear = linearize(copy.deepcopy(theirs), LinearAttentionConfig(window=WINDOW)).eval()
    return {
        THEIRS: (theirs, by_modules),
        "imported": (ours, by_step),
        "imported, modules": (ours, by_modules),
        "imported, int8": (quantize(copy.deepcopy(ours)), by_step),
        "imported, 4 bits": (quantize(copy.deepcopy(ours), 4), by_step),
        "linearized": (linear, by_step),
        "linearized, int8": (quantize(copy.deepcopy(linear)), by_step),
        "linearized, 4 bits": (quantize(copy.deepcopy(linear), 4), by_step),
    }


def read_in_turn(
    made: dict[str, tuple[Model, Read]], ids: Tensor, rounds: int, only: str = ""
) -> dict[str, list[float]]:
    """Milliseconds of each token after a prompt, by contender; `only` one, or all in turn."""
    chosen = {name: own for name, own in made.items() if only in ("", name)}
    decoders = {name: Decoder(model) for name, (model, _) in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for decoder in decoders.values():
        decoder.read_prompt(ids, None, 2048)
    for token in torch.arange(rounds + 1)[:, None].expand(-1, len(ids)):
        for name, decoder in decoders.items():
            start = perf_counter()
            chosen[name][1](decoder, token)
            times[name].append(1e3 * (perf_counter() - start))
    return times


def measure(
    made: dict[str, tuple[Model, Read]], context: int, sequences: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds of a token and tokens per second, by contender."""
    ids = torch.randint(1000, (sequences, context), generator=torch.Generator().manual_seed(0))
    times = read_in_turn(made, ids, rounds)
    with patch_transformers():
        times["transformers, patched"] = read_in_turn(made, ids, rounds, only=THEIRS)[THEIRS]
    # The first token makes room and packs calls.
    least = {name: min(found[1:]) for name, found in times.items()}
    middle = {name: median(found[1:]) for name, found in times.items()}
    speed = {name: 1e3 * sequences / found for name, found in least.items()}
    return {"least": least, "median": middle, "tokens per second": speed}


def main() -> None:
    parser = options(__doc__, "decoding", rounds=24)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--sequences", type=int, nargs="+", default=(1,))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    settings = {"rounds": chosen.rounds, "threads": chosen.threads, "model": chosen.model.name}
    report = open_report("decoding", chosen.out, settings)
    made: dict[str, tuple[Model, Read]] = {}
    for context, sequences in product(chosen.contexts, chosen.sequences):
        beside = "" if sequences == 1 else f", {sequences} sequences"
        if not report.has(group := f"context {context}{beside}"):
            made = made or contenders(chosen.model)
            found = measure(made, context, sequences, chosen.rounds)
            report.add(group, [{"context": context, "sequences": sequences, **found}])


if __name__ == "__main__":
    main()
