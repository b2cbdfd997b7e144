"""The general rank-one rule beside the delta rule at equal sizes, kernel by kernel; prints JSON.

    python benchmarks/dplr.py [--rounds 9] [--out benchmarks/results/dplr.json]

Milliseconds of processor time on one thread, forward and forward with backward, of `Delta`, and as
multiples of it `DPLR` with b=None (`one key`), with keys apart (`keys apart`) and with what is
erased read before the decay (`before`): in chunks of torch (`chunk`), by the blocked and by the
compiled kernels, 1024 tokens of 4 heads of 64 × 64; and one token of 16 heads. In turns, medians.
The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels import TABLE
from fastweights.lab.bench.machine import provenance
from fastweights.methods import Chunkwise
from fastweights.recurrence import DPLR, Delta, Recurrence
from fastweights.training.loop.files import write_json

Run = Callable[[Recurrence, Tensor], tuple[Tensor, Tensor]]
DECAYS = {"none": 0, "scalar": 1, "vector": 64}
BY_NAME = {kernel.name: kernel.compute for kernel in TABLE}
WAYS: dict[str, Run | tuple[str, str]] = {
    "chunk": Chunkwise(64).evaluate,  # type: ignore[dict-item]
    "blocked": ("blocked delta (torch)", "blocked DPLR (torch)"),
    "compiled": ("delta (compiled)", "DPLR (compiled)"),
}


def records(t: int, heads: int, width: int) -> dict[str, Recurrence]:
    """Of one delta rule, and of others on streams as large."""
    q, k, v, b = (torch.randn(1, t, heads, 64) for _ in range(4))
    k, b, beta = F.normalize(k, dim=-1), F.normalize(b, dim=-1), torch.rand(1, t, heads, 1)
    log_decay = -0.1 * torch.rand(1, t, heads, width) if width else None
    return {
        "delta": Delta(q, k, v, beta, log_decay),
        "one key": DPLR(q, beta * k, v, k, None, log_decay),
        "keys apart": DPLR(q, beta * k, v, k, beta * b, log_decay),
        "before": DPLR(q, beta * k, v, k, beta * b, log_decay, before=True),
    }


def run_of(way: str, record: Recurrence) -> Run:
    found = WAYS[way]
    if not isinstance(found, tuple):
        return found
    return BY_NAME[found[isinstance(record, DPLR)]]


def once(run: Run, record: Recurrence, learns: bool) -> None:
    streams = list(record.streams.values())
    for stream in streams:
        stream.requires_grad_(learns)
    o, _ = run(record, record.initial_state())
    if learns:
        torch.autograd.grad(o.sum(), streams)


def measure(way: str, given: dict[str, Recurrence], learns: bool, rounds: int) -> dict[str, float]:
    """The delta rule's milliseconds, and the others' as multiples."""
    times: dict[str, list[float]] = {name: [] for name in given}
    repeats = 100 if len(given["delta"]) == 1 else 1
    for _ in range(rounds + 1):
        for name, record in given.items():
            run, start = run_of(way, record), time.process_time()
            for _ in range(repeats):
                once(run, record, learns)
            times[name].append(1e3 * (time.process_time() - start) / repeats)
    found = {name: statistics.median(one[1:]) for name, one in times.items()}
    return {n: round(x if n == "delta" else x / found["delta"], 3) for n, x in found.items()}


def rows(rounds: int) -> Iterator[dict[str, object]]:
    for decay, width in DECAYS.items():
        for way in WAYS:
            for learns in (False, True):
                row = {"kernel": way, "decay": decay, "backward": learns, "tokens": 1024}
                yield {**row, **measure(way, records(1024, 4, width), learns, rounds)}
        row = {"kernel": "compiled", "decay": decay, "backward": False, "tokens": 1}
        yield {**row, **measure("compiled", records(1, 16, width), False, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each record")
    parser.add_argument("--out", type=Path, help="a file for all rows, the machine and versions")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for row in rows(given.rounds):
        print(json.dumps(row), flush=True)
        found.append(row)
    if given.out is not None:
        write_json(given.out, {**provenance(), "rounds": given.rounds, "rows": found})


if __name__ == "__main__":
    main()
