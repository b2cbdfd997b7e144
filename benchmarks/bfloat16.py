"""bfloat16 beside float32 on a CPU, in models and in the compiled kernels; writes JSON.

    python benchmarks/bfloat16.py --out benchmarks/results/bfloat16.json

`models`: milliseconds of language models (width 512, 4 layers) in float32, in bfloat16 and, but for
decoding, in float32 under autocast: a text of 512 tokens read, forward and backward, and 32 tokens
decoded one by one. `operations`: milliseconds of forward, and of forward and backward, on streams
of bfloat16 read as they are (`narrow`), converted to float32 before and back behind (`converted`),
and of float32 throughout (`float32`). In turns, one thread, the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.lab.bench.machine import Machine, commit, versions
from fastweights.methods import evaluate
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.ops import convolve, rms_normalize
from fastweights.recurrence import Decay, Delta

MIXERS = ("metala", "gated_deltanet", "mamba2", "softmax")
TOKENS, DECODED, WIDTH, HEADS = 512, 32, 512, 8
NARROW = torch.bfloat16
Times = dict[str, float]


def time_in_turn(acts: dict[str, Callable[[], object]], rounds: int) -> Times:
    """The fastest of each, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds + 1):
        for name, act in acts.items():
            start = time.perf_counter()
            act()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(found[1:]) for name, found in times.items()}


@torch.no_grad()
def read(model: FastWeightsForCausalLM, ids: Tensor) -> None:
    model(input_ids=ids)


def learn(model: FastWeightsForCausalLM, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


@torch.no_grad()
def decode(model: FastWeightsForCausalLM, ids: Tensor) -> None:
    cache = None
    for i in range(DECODED):
        cache = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).past_key_values


def in_autocast(act: Callable[..., None], *given: object) -> None:
    with torch.autocast("cpu", dtype=NARROW):
        act(*given)


def measure_model(mixer: str, rounds: int) -> dict[str, Times]:
    config = FastWeightsConfig(
        vocab_size=256, hidden_size=WIDTH, num_hidden_layers=4, mixers=[{"name": mixer}]
    )
    wide = FastWeightsForCausalLM(config)
    narrow, ids = copy.deepcopy(wide).to(NARROW), torch.randint(0, 256, (1, TOKENS))
    found = {}
    for act in (read, learn, decode):
        acts = {"float32": partial(act, wide, ids), "bfloat16": partial(act, narrow, ids)}
        if act is not decode:
            acts["autocast"] = partial(in_autocast, act, wide, ids)
        found[act.__name__] = time_in_turn(acts, rounds)
    return found


def decay(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return evaluate(Decay(q, k, v, log_decay))[0]


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return evaluate(Delta(q, k, v, beta, log_decay))[0]


def convolution(tail: Tensor, x: Tensor, taps: Tensor) -> Tensor:
    return convolve(tail, x, taps)[0]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_normalize(x, weight, 1e-5)


def operations() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of streams, and these."""
    heads = (1, TOKENS, HEADS)
    q, v = (torch.randn(*heads, WIDTH // HEADS) for _ in range(2))
    k = F.normalize(torch.randn(*heads, WIDTH // HEADS), dim=-1)
    beta, gate = torch.rand(*heads, 1), -torch.rand(*heads, 1)
    x = torch.randn(1, TOKENS, WIDTH)
    return {
        "decay": (decay, [q, k, v, gate]),
        "decay per key": (decay, [q, k, v, -torch.rand(*k.shape)]),
        "delta": (delta, [q, k, v, beta, gate]),
        "convolution": (convolution, [x[:, :3], x, torch.randn(4, WIDTH)]),
        "norm": (norm, [x, torch.randn(WIDTH)]),
    }


def convert(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *streams: function(*(s.float() for s in streams)).to(NARROW)


def differentiate(function: Callable[..., Tensor], streams: Sequence[Tensor]) -> None:
    leaves = [s.detach().requires_grad_() for s in streams]
    y = function(*leaves)
    torch.autograd.grad(y, leaves, y.detach())


@torch.no_grad()
def compute(function: Callable[..., Tensor], streams: Sequence[Tensor]) -> None:
    function(*streams)


def measure_operation(
    function: Callable[..., Tensor], streams: Sequence[Tensor], rounds: int
) -> dict[str, Times]:
    halves = [s.to(NARROW) for s in streams]
    given = {
        "narrow": (function, halves),
        "converted": (convert(function), halves),
        "float32": (function, streams),
    }
    return {
        name: time_in_turn({n: partial(act, *g) for n, g in given.items()}, 10 * rounds)
        for name, act in (("forward", compute), ("forward and backward", differentiate))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    about = {"commit": commit(), "versions": versions()}
    machine = asdict(Machine.here(torch.device("cpu")))
    found = {
        **about,
        "machine": machine | {"capability": torch.backends.cpu.get_cpu_capability()},
        "models": {mixer: measure_model(mixer, chosen.rounds) for mixer in MIXERS},
        "operations": {
            name: measure_operation(*given, chosen.rounds) for name, given in operations().items()
        },
    }
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
