"""bfloat16 beside float32 on a CPU, in models and in the compiled kernels.

    python benchmarks/bfloat16.py

`model`: milliseconds of language models (width 512, 4 layers) in float32, in bfloat16 and, but for
decoding, in float32 under autocast: a text of 512 tokens read, forward and backward, and 32 tokens
decoded one by one. `operation`: milliseconds of forward, and of forward and backward, on streams
of bfloat16 read as they are (`narrow`), converted to float32 before and back behind (`converted`),
and of float32 throughout (`float32`). In turns, one thread, medians.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.methods import evaluate
from fastweights.models import FastWeightsForCausalLM
from fastweights.ops import convolve, rms_normalize
from fastweights.recurrence import Decay, Delta
from measuring import begin, build, decode, milliseconds, options

MIXERS = ("metala", "gated_deltanet", "mamba2", "softmax")
TOKENS, DECODED, WIDTH, HEADS = 512, 32, 512, 8
NARROW = torch.bfloat16
Found = dict[str, dict[str, float]]


@torch.no_grad()
def read(model: FastWeightsForCausalLM, ids: Tensor) -> None:
    model(input_ids=ids)


def learn(model: FastWeightsForCausalLM, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def in_autocast(act: Callable[..., None], *given: object) -> None:
    with torch.autocast("cpu", dtype=NARROW):
        act(*given)


def measure_model(mixer: str, rounds: int) -> Found:
    wide = build(mixer, WIDTH, 4)
    narrow, ids = copy.deepcopy(wide).to(NARROW), torch.randint(0, 256, (1, TOKENS))
    found = {}
    for act in (read, learn, decode):
        given = ids[:, :DECODED] if act is decode else ids
        acts = {"float32": partial(act, wide, given), "bfloat16": partial(act, narrow, given)}
        if act is not decode:
            acts["autocast"] = partial(in_autocast, act, wide, ids)
        found[act.__name__] = milliseconds(acts, rounds)
    return found


def operations() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions of streams, and these."""
    heads = (1, TOKENS, HEADS)
    q, v = (torch.randn(*heads, WIDTH // HEADS) for _ in range(2))
    k = F.normalize(torch.randn(*heads, WIDTH // HEADS), dim=-1)
    beta, gate = torch.rand(*heads, 1), -torch.rand(*heads, 1)
    x = torch.randn(1, TOKENS, WIDTH)
    return {
        "decay": (lambda *s: evaluate(Decay(*s))[0], [q, k, v, gate]),
        "decay per key": (lambda *s: evaluate(Decay(*s))[0], [q, k, v, -torch.rand(*k.shape)]),
        "delta": (lambda *s: evaluate(Delta(*s))[0], [q, k, v, beta, gate]),
        "convolution": (lambda *s: convolve(*s)[0], [x[:, :3], x, torch.randn(4, WIDTH)]),
        "norm": (lambda *s: rms_normalize(*s, 1e-5), [x, torch.randn(WIDTH)]),
    }


def differentiate(function: Callable[..., Tensor], streams: Sequence[Tensor]) -> None:
    leaves = [s.detach().requires_grad_() for s in streams]
    y = function(*leaves)
    torch.autograd.grad(y, leaves, y.detach())


@torch.no_grad()
def compute(function: Callable[..., Tensor], streams: Sequence[Tensor]) -> None:
    function(*streams)


def measure_operation(
    function: Callable[..., Tensor], streams: Sequence[Tensor], rounds: int
) -> Found:
    halves = [s.to(NARROW) for s in streams]
    given = {
        "narrow": (function, halves),
        "converted": (lambda *s: function(*(x.float() for x in s)).to(NARROW), halves),
        "float32": (function, streams),
    }
    return {
        name: milliseconds({n: partial(act, *g) for n, g in given.items()}, 10 * rounds)
        for name, act in (("forward", compute), ("forward and backward", differentiate))
    }


def main() -> None:
    chosen = options(__doc__, "bfloat16", rounds=7).parse_args()
    report = begin("bfloat16", chosen, capability=torch.backends.cpu.get_cpu_capability())
    torch.manual_seed(0)
    measures = {("model", mixer): partial(measure_model, mixer) for mixer in MIXERS}
    measures |= {
        ("operation", name): partial(measure_operation, *given)
        for name, given in operations().items()
    }
    for (part, name), measure in measures.items():
        if not report.has(group := f"{part} {name}"):
            report.add(group, [{"part": part, "name": name, **measure(chosen.rounds)}])


if __name__ == "__main__":
    main()
