"""Weights of 8 and 4 bits beside float32 on a CPU: perplexity, size and speed.

    pip install torchao==0.18.0    # for the comparison; left out where it is missing
    python benchmarks/quantized.py

`trained`: perplexity per byte of held-out Shakespeare of models (width 128, 3 layers) trained here
for `--steps` updates, as they are, by `fastweights.models.quantize`, and by torchao's
`Int8WeightOnlyConfig`. The linearized one is the Llama above it, trained on for a third of the
steps. `speed`: models of width 1024 with 8 layers and random weights: bytes, milliseconds per token
decoded alone and in a batch of 8, and of 256 tokens read; in turns, one thread, medians.
"""

from __future__ import annotations

import copy
import gzip
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from math import exp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastweights
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.models import quantize
from measuring import begin, build, decode, milliseconds, options

TEXT = Path(fastweights.__file__).parent / "data" / "tinyshakespeare.txt.gz"
BATCH, LENGTH, HELD_OUT, LONG, DECODED = 8, 128, 512, 256, 16
MIXERS = ("metala", "gated_deltanet", "mamba2")
Model = Any


def by_torchao(model: Model) -> Model:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


WAYS: dict[str, Callable[[Model], Model]] = {
    "float32": lambda model: model,
    "int8": quantize,
    "4 bits": partial(quantize, bits=4),
}
if find_spec("torchao"):
    WAYS["torchao int8"] = by_torchao


def ways_of(model: Model) -> dict[str, Model]:
    return {way: quantized(copy.deepcopy(model)).eval() for way, quantized in WAYS.items()}


def train(model: Model, text: Tensor, steps: int) -> Model:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([text[i : i + LENGTH] for i in starts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def perplexity(model: Model, text: Tensor) -> float:
    rows = text[: 16 * HELD_OUT].view(16, HELD_OUT)
    losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in rows]
    return exp(sum(losses) / len(losses))


def trained(steps: int) -> Iterator[tuple[str, Model, Tensor]]:
    """Models by name, and text that none has seen."""
    text = torch.frombuffer(bytearray(gzip.decompress(TEXT.read_bytes())), dtype=torch.uint8).long()
    learnt, held_out = text[: -(1 << 16)], text[-(1 << 16) :]
    for name in (*MIXERS, "llama"):
        model = train(build(name, 128, 3).train(), learnt, steps)
        yield name, model, held_out
    linear = linearize(copy.deepcopy(model), LinearAttentionConfig(window=16))
    yield "llama, linearized", train(linear.train(), learnt, steps // 3), held_out


@torch.no_grad()
def read(model: Model, ids: Tensor) -> None:
    model(input_ids=ids, use_cache=True)


def measure_speed(name: str, rounds: int) -> dict[str, dict[str, float]]:
    model = build(name, 1024, 8)
    if "linearized" in name:
        model = linearize(model, LinearAttentionConfig(window=16))
    made = ways_of(model)
    del model
    ids = torch.randint(256, (8, LONG), generator=torch.Generator().manual_seed(0))
    acts = {
        "token": (DECODED, partial(decode, ids=ids[:1, :DECODED])),
        "token, batch of 8": (DECODED, partial(decode, ids=ids[:, :DECODED])),
        "prefill": (1, partial(read, ids=ids[:1])),
    }
    found = {"bytes": {way: size_of(one) for way, one in made.items()}}
    for what, (count, act) in acts.items():
        times = milliseconds({way: partial(act, one) for way, one in made.items()}, rounds)
        found[what] = {way: time / count for way, time in times.items()}
    return found


def size_of(model: Model) -> float:
    return float(sum(_nbytes(x) for x in (*model.parameters(), *model.buffers())))


def _nbytes(x: Tensor) -> int:
    """Of what a tensor consists of, where it is of a class of torchao."""
    names = getattr(x, "tensor_data_names", None)
    return x.nbytes if names is None else sum(getattr(x, name).nbytes for name in names)


def main() -> None:
    parser = options(__doc__, "quantized", rounds=3)
    parser.add_argument("--steps", type=int, default=240)
    chosen = parser.parse_args()
    report = begin("quantized", chosen, ways=list(WAYS), steps=chosen.steps)
    for name in (*MIXERS, "llama, linearized"):
        if not report.has(group := f"speed of {name}"):
            found = measure_speed(name, chosen.rounds)
            report.add(group, [{"part": "speed", "name": name, **found}])
    if not report.has("perplexity"):
        made = ((name, ways_of(model), text) for name, model, text in trained(chosen.steps))
        rows = [
            {"part": "trained", "name": name}
            | {way: perplexity(model, text) for way, model in ways.items()}
            for name, ways, text in made
        ]
        report.add("perplexity", rows)


if __name__ == "__main__":
    main()
