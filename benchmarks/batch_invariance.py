"""What batch invariance costs, and what it takes away, on a CPU.

    python benchmarks/batch_invariance.py

Language models (width 256, 4 layers, float32) inside `batch_invariant` and outside, in turns, one
thread: milliseconds of a text of 128 tokens read, of 4 texts of 32 read together, of 4 such texts
continued by 16 tokens, and of a gradient of the 4; medians. `differences`: the largest between
log-probabilities of the 4 texts read together and the same read each alone, and each decoded token
by token, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.models import batch_invariant, log_probabilities
from measuring import begin, build, decode, milliseconds, options

MIXERS = ("metala", "gated_deltanet", "softmax")
VOCABULARY, WIDTH, LAYERS, LONG, TEXTS, TOKENS, NEW = 256, 256, 4, 128, 4, 32, 16
Model = Any


@torch.no_grad()
def read(model: Model, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def write(model: Model, ids: Tensor) -> Tensor:
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, **lengths, do_sample=False, pad_token_id=0)


def learn(model: Model, ids: Tensor) -> None:
    score(model(input_ids=ids, use_cache=False).logits, ids).sum().backward()


def score(logits: Tensor, ids: Tensor) -> Tensor:
    return log_probabilities(logits[:, :-1], ids[:, 1:])


def in_mode(mode: Callable[[], AbstractContextManager[None]], act: Callable[[], object]) -> None:
    with mode():
        act()


def measure(model: Model, rounds: int) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    long, ids = (
        torch.randint(VOCABULARY, shape, generator=generator)
        for shape in ((1, LONG), (TEXTS, TOKENS))
    )
    acts = {
        f"read {LONG} tokens": partial(read, model, long),
        f"read {TEXTS} x {TOKENS} tokens": partial(read, model, ids),
        f"write {TEXTS} x {NEW} tokens": partial(write, model, ids),
        f"gradient of {TEXTS} x {TOKENS} tokens": partial(learn, model, ids),
    }
    modes = {"outside": nullcontext, "inside": partial(batch_invariant, model)}
    times = {
        name: milliseconds(
            {place: partial(in_mode, mode, act) for place, mode in modes.items()}, rounds
        )
        for name, act in acts.items()
    }
    ratios = {name: {"ratio": found["inside"] / found["outside"]} for name, found in times.items()}
    return {name: times[name] | ratios[name] for name in acts} | {
        "differences": differences(model, ids)
    }


def differences(model: Model, ids: Tensor) -> dict[str, float]:
    """Of log-probabilities, in nats."""
    together = score(read(model, ids), ids)
    alone = torch.cat([score(read(model, row), row) for row in ids.split(1)])
    decoded = torch.cat([score(decode(model, row), row) for row in ids.split(1)])
    with batch_invariant(model):
        inside = score(read(model, ids), ids)
        inside_alone = torch.cat([score(decode(model, row), row) for row in ids.split(1)])
    pairs = {
        "batch": (together, alone),
        "decoded": (together, decoded),
        "inside": (inside, inside_alone),
    }
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}


def main() -> None:
    chosen = options(__doc__, "batch_invariance", rounds=3).parse_args()
    report = begin("batch_invariance", chosen)
    for name in (*MIXERS, "llama (transformers)"):
        if not report.has(name):
            report.add(name, [measure(build(name, WIDTH, LAYERS).eval(), chosen.rounds)])


if __name__ == "__main__":
    main()
