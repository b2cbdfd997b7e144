"""Rules of published models beside their reference implementations; prints JSON.

    python benchmarks/rules.py [--rounds 9] [--tokens 1024] [--out benchmarks/results/rules.json]

Gated DeltaNet and KDA beside the torch code of transformers, which its models run where no GPU is,
and beside flash-linear-attention's naive code if it is installed (`pip install flash-linear-
attention einops`); others beside the latter's alone, which goes token by token for GDN-2, gated
DeltaProduct (two steps per token) and GSA, and erases before the decay for Comba. Milliseconds of
processor time on one thread of ours, by the kernel that `Auto` takes, and theirs as multiples of
it: forward, and forward with backward, one sequence of 4 heads of 64 × 64. In turns, medians. Each
row says how far the outputs are apart; of TTT-Linear the weights after the last token, as the naive
code adds its residual to another tensor than the paper, at the same cost, and takes its rates for
the paper's s. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from inspect import unwrap
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from fastweights import evaluate
from fastweights.lab.bench.machine import provenance
from fastweights.recurrence import DPLR, TTT, Decay, Delta, LogLinear, Slots, Softmax, Substeps
from fastweights.training.loop.files import write_json

try:
    from fla.ops.comba.naive import naive_chunk_comba
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
    from fla.ops.gdn2.naive import naive_recurrent_gdn2
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise
    from fla.ops.gsa.naive import naive_recurrent_gsa
    from fla.ops.kda.naive import naive_chunk_kda
    from fla.ops.log_linear_attn.naive import naive_log_linear_attn
    from fla.ops.ttt.naive import chunk_ttt_linear_ref
except ImportError:
    HAS_FLA = False
else:
    HAS_FLA = True

HEADS, WIDTH = 4, 64
EPS = 1e-6
# the torch code itself: what they import prefers flash-linear-attention's kernels to it
TORCH_GATED_DELTA, TORCH_KDA = map(
    unwrap, (torch_chunk_gated_delta_rule, chunk_kimi_delta_attention)
)
Run = Callable[..., Tensor]
T = TypeVar("T")


class Comparison(NamedTuple):
    """A rule's streams, those who evaluate it by name, ours first, and what is compared of each if
    it is not the output.
    """

    rule: str
    streams: tuple[Tensor, ...]
    runs: dict[str, Run]
    compared: dict[str, Run] | None = None


def gated_deltanet(tokens: int) -> Comparison:
    q, k, v, beta, log_decay = delta_streams(tokens, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return evaluate(Delta(q * WIDTH**-0.5, k, v, beta, g))[0]

    def transformers(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return TORCH_GATED_DELTA(q, k, v, g=g[..., 0], beta=beta[..., 0])[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return naive_chunk_gated_delta_rule(q, k, v, g=g[..., 0], beta=beta[..., 0])[0]

    runs = {"ours": ours, "transformers": transformers, "fla, naive": fla}
    return Comparison("gated_deltanet", (q, k, v, beta, log_decay), available(runs))


def kda(tokens: int) -> Comparison:
    streams = delta_streams(tokens, WIDTH)

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return evaluate(Delta(q * WIDTH**-0.5, k, v, beta, g))[0]

    def transformers(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return TORCH_KDA(
            q, k, v, g=g, beta=beta[..., 0], initial_state=None, output_final_state=False
        )[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return naive_chunk_kda(q, k, v, g=g, beta=beta[..., 0])[0]

    runs = {"ours": ours, "transformers": transformers, "fla, naive": fla}
    return Comparison("kda", streams, available(runs))


def rwkv7(tokens: int) -> Comparison:
    r, k, v, removed = (torch.randn(1, tokens, HEADS, WIDTH) for _ in range(4))
    rate, log_decay = torch.rand_like(k), -0.6065 * torch.rand_like(k)
    streams = (r, k, v, F.normalize(removed, dim=-1), rate, log_decay)

    def ours(r: Tensor, k: Tensor, v: Tensor, a: Tensor, rate: Tensor, g: Tensor) -> Tensor:
        return evaluate(DPLR(r * WIDTH**-0.5, k, v, a, a * rate, g, before=True))[0]

    def fla(r: Tensor, k: Tensor, v: Tensor, a: Tensor, rate: Tensor, g: Tensor) -> Tensor:
        given = (s.transpose(1, 2) for s in (r, k, v, -a, a * rate, g))
        return dplr_chunkwise(*given)[0].transpose(1, 2)

    return Comparison("rwkv7", streams, available({"ours": ours, "fla, naive": fla}))


def comba(tokens: int) -> Comparison:
    q, k, v, beta, log_decay = delta_streams(tokens, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, p: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return evaluate(DPLR(q * WIDTH**-0.5, beta * k, v, p, None, g, before=True))[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, p: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return naive_chunk_comba(q, k, v, p, g[..., 0], beta[..., 0])[0]

    streams = q, k, v, 0.5 * k, beta, log_decay
    return Comparison("comba", streams, available({"ours": ours, "fla, naive": fla}))


def gdn2(tokens: int) -> Comparison:
    q, k, v, _, log_decay = delta_streams(tokens, WIDTH)

    def ours(q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, g: Tensor) -> Tensor:
        return evaluate(DPLR(q * WIDTH**-0.5, k, write * v, erase * k, None, g))[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, g: Tensor) -> Tensor:
        return naive_recurrent_gdn2(q, k, v, g, erase, write)[0]

    streams = q, k, v, torch.rand_like(k), torch.rand_like(v), log_decay
    return Comparison("gdn2", streams, available({"ours": ours, "fla, naive": fla}))


def gated_deltaproduct(tokens: int) -> Comparison:
    q, *_, log_decay = delta_streams(tokens, 1)
    _, k, v, beta, _ = delta_streams(2 * tokens, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        k, v, beta = (s.unflatten(1, (-1, 2)) for s in (k, v, beta))
        return evaluate(Substeps.of(q * WIDTH**-0.5, beta * k, v, k, log_decay=g))[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        given = (q, k, v, g[..., 0], beta[..., 0], WIDTH**-0.5)
        return naive_recurrent_gated_delta_product(*given, num_householder=2)[0]

    streams = q, k, v, beta, log_decay
    return Comparison("gated_deltaproduct", streams, available({"ours": ours, "fla, naive": fla}))


def gsa(tokens: int) -> Comparison:
    q, k, v, _, log_decay = delta_streams(tokens, WIDTH)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return evaluate(Slots(q * WIDTH**-0.5, k, v, -torch.expm1(g), g))[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return naive_recurrent_gsa(q, k, v, -torch.expm1(g), g)[0]

    return Comparison("gsa", (q, k, v, log_decay), available({"ours": ours, "fla, naive": fla}))


def loglinear(tokens: int) -> Comparison:
    q, k, v, _, log_decay = delta_streams(tokens, 1)
    weights = torch.rand(1, tokens, HEADS, (tokens - 1).bit_length() + 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, g: Tensor) -> Tensor:
        return evaluate(LogLinear(Decay(q, k, v, g), weights))[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, g: Tensor) -> Tensor:
        return naive_log_linear_attn(q, k, v, g[..., 0], weights)

    streams = q, k, v, weights, log_decay
    return Comparison("loglinear", streams, available({"ours": ours, "fla, naive": fla}))


def fox(tokens: int) -> Comparison:
    q, k, v, _, log_decay = delta_streams(tokens, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return evaluate(Softmax(q, k, v, log_decay=g))[0]

    def fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return naive_forgetting_attn(q, k, v, g[..., 0])

    return Comparison("fox", (q, k, v, log_decay), available({"ours": ours, "fla, naive": fla}))


def ttt_linear(tokens: int) -> Comparison:
    q, k, v = (torch.randn(1, tokens, HEADS, WIDTH) for _ in range(3))
    gain, shift, rate = *torch.rand(2, HEADS, WIDTH), torch.rand_like(q[..., :1])
    network = 0.02 * torch.randn(HEADS, WIDTH + 1, WIDTH)
    streams = (q, k, v, rate / WIDTH, network, gain, shift)

    def ours(
        q: Tensor, k: Tensor, v: Tensor, rate: Tensor, network: Tensor, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        one, numbers = torch.ones(1, 1, 1, 1), network.flatten(1)
        o, state = evaluate(TTT(q, k, v, one, rate, numbers, gain, shift, eps=EPS))
        return o, (network + state[0])[:, :, :-1]

    def fla(
        q: Tensor, k: Tensor, v: Tensor, rate: Tensor, network: Tensor, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        # it multiplies q where it stands
        given = (q.clone(), k, v, gain, shift, rate, 1.0, EPS, 16)
        start = network[None, :, :-1], network[None, :, -1:]
        return chunk_ttt_linear_ref(*given, *start, output_final_state=True)[:2]

    runs = available({"ours": ours, "fla, naive": fla})
    return Comparison(
        "ttt_linear",
        streams,
        {name: _part(run, 0) for name, run in runs.items()},
        {name: _part(run, 1) for name, run in runs.items()},
    )


RULES = (
    *(gated_deltanet, kda, rwkv7, comba, gdn2, gated_deltaproduct),
    *(gsa, loglinear, fox, ttt_linear),
)


def _part(run: Callable[..., tuple[Tensor, Tensor]], number: int) -> Run:
    return lambda *streams: run(*streams)[number]


def delta_streams(tokens: int, decays: int) -> tuple[Tensor, ...]:
    """q and k of unit length, v, β and the log decay."""
    q, k, v = (torch.randn(1, tokens, HEADS, WIDTH) for _ in range(3))
    beta, log_decay = torch.rand(1, tokens, HEADS, 1), -0.1 * torch.rand(1, tokens, HEADS, decays)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, log_decay


def available(runs: dict[str, Callable[..., T]]) -> dict[str, Callable[..., T]]:
    return {n: run for n, run in runs.items() if HAS_FLA or "fla" not in n}


def once(run: Run, streams: tuple[Tensor, ...], learns: bool) -> float:
    """Milliseconds of processor time."""
    given = [s.detach().requires_grad_(learns) for s in streams]
    start = time.process_time()
    o = run(*given)
    if learns:
        torch.autograd.grad(o.sum(), given)
    return 1e3 * (time.process_time() - start)


def rows(comparison: Comparison, rounds: int) -> Iterator[dict[str, object]]:
    rule, streams, runs, compared = comparison
    found = {name: run(*streams) for name, run in (compared or runs).items()}
    want = found.pop("ours")
    apart = {name: (o - want).abs().max().item() for name, o in found.items()}
    for learns in (False, True):
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds + 1):
            for name, run in runs.items():
                times[name].append(once(run, streams, learns))
        found = {name: statistics.median(one[1:]) for name, one in times.items()}
        ratios = {n: round(x / found["ours"], 2) for n, x in found.items() if n != "ours"}
        row = {"rule": rule, "tokens": len(streams[0][0]), "backward": learns}
        yield {**row, "ours_ms": round(found["ours"], 2), **ratios, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each implementation")
    parser.add_argument("--tokens", type=int, default=1024, help="length, a multiple of 64")
    parser.add_argument("--out", type=Path, help="a file for all rows, the machine and versions")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not HAS_FLA:
        print("flash-linear-attention is not installed: its rows are left out", file=sys.stderr)
    found = []
    for rule in RULES:
        for row in rows(rule(given.tokens), given.rounds):
            print(json.dumps(row), flush=True)
            found.append(row)
    if given.out is not None:
        write_json(given.out, {**provenance(), "rounds": given.rounds, "rows": found})


if __name__ == "__main__":
    main()
