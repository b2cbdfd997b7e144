"""The compiled kernels against the torch kernels that take over without them, and that of Mamba's
rule against the scan of its written-out decay, in one alternating run; prints JSON.

    python benchmarks/native.py [--threads 2] [--repeats 7] [--cpu-time] [--only NAME]

`--cpu-time` counts processor time instead of wall time: on a busy machine, with one thread, it is
the fairer clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import kernels
from fastweights.methods import evaluate
from fastweights.recurrence import Decay, Delta, Recurrence, Selective

FALLBACK = {"scan (compiled)": "blocked decay (torch)", "decay (compiled)": "blocked decay (torch)"}
FALLBACK |= {"delta (compiled)": "chunk loop (torch)"}
FALLBACK |= {"selective scan (compiled)": "selective: in blocks"}


def gates(steep: bool, *shape: int) -> Tensor:
    return -torch.rand(*shape) * (8.0 if steep else 0.05)


def decay(b: int, t: int, h: int, d: int, width: int, steep: bool = False) -> Decay:
    q, k, v = (torch.randn(b, t, h, d) for _ in range(3))
    return Decay(q, k / d**0.5, v, gates(steep, b, t, h, width) if width else None)


def delta(b: int, t: int, h: int, d: int, width: int, steep: bool = False) -> Delta:
    given = decay(b, t, h, d, width, steep)
    assert given.k is not None
    return Delta(
        given.q, F.normalize(given.k, dim=-1), given.v, torch.rand(b, t, h, 1), given.log_decay
    )


def selective(b: int, t: int, h: int, k: int) -> Selective:
    q, key = (torch.randn(b, t, 1, k) for _ in range(2))
    delta, rate = gates(False, b, t, h, 1), torch.arange(1.0, k + 1).expand(1, 1, h, k)
    return Selective(q, key / k**0.5, torch.randn(b, t, h, 1), delta, rate)


def records() -> Iterator[tuple[str, Recurrence]]:
    yield "decay none B1 T2048 H8 d64", decay(1, 2048, 8, 64, 0)
    yield "decay scalar B1 T2048 H8 d64", decay(1, 2048, 8, 64, 1)
    yield "decay vector B1 T2048 H8 d64", decay(1, 2048, 8, 64, 64)
    yield "decay vector, steep B1 T2048 H8 d64", decay(1, 2048, 8, 64, 64, steep=True)
    yield "decay tied B1 T2048 H8 d64", replace(decay(1, 2048, 8, 64, 64), k=None)
    yield "decay scalar B1 T8192 H8 d64", decay(1, 8192, 8, 64, 1)
    yield "decay scalar B1 T2048 H8 d128", decay(1, 2048, 8, 128, 1)
    yield "decay scalar B4 T2048 H16 d64", decay(4, 2048, 16, 64, 1)
    yield "delta none B1 T2048 H8 d64", delta(1, 2048, 8, 64, 0)
    yield "delta scalar B1 T2048 H8 d64", delta(1, 2048, 8, 64, 1)
    yield "delta vector B1 T2048 H8 d64", delta(1, 2048, 8, 64, 64)
    yield "delta vector, steep B1 T2048 H8 d64", delta(1, 2048, 8, 64, 64, steep=True)
    yield (
        "element-wise scan B1 T2048 d1024",
        replace(decay(1, 2048, 1024, 1, 1), q=torch.ones(1, 1, 1, 1)),
    )
    yield (
        "selective scan B1 T512 d1024 N16",
        replace(
            decay(1, 512, 1024, 16, 16),
            q=torch.randn(1, 512, 1, 16),
            v=torch.randn(1, 512, 1024, 1),
        ),
    )
    yield "Mamba's rule B64 T32 d96 N16", selective(64, 32, 96, 16)
    yield "Mamba's rule B8 T512 d512 N16", selective(8, 512, 512, 16)
    yield "step decay B1 H8 d64", decay(1, 1, 8, 64, 1)
    yield "step delta B1 H8 d64", delta(1, 1, 8, 64, 1)
    yield "step decay B32 H16 d128", decay(32, 1, 16, 128, 1)
    yield "step delta B32 H16 d128", delta(32, 1, 16, 128, 1)


def forward(recurrence: Recurrence, state: Tensor, kernel: str) -> None:
    with torch.no_grad(), kernels.only(kernel):
        evaluate(recurrence, state)


def both(recurrence: Recurrence, state: Tensor, kernel: str) -> None:
    leaves = {name: s.detach().requires_grad_() for name, s in recurrence.streams.items()}
    with kernels.only(kernel):
        o, _ = evaluate(replace(recurrence, **leaves), state)
    o.sum().backward()


def medians(
    run: Callable[[str], None], names: list[str], repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Milliseconds per call of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names * (repeats + 1):
        start = clock()
        run(name)
        times[name].append((clock() - start) * 1e3)
    return [statistics.median(found[1:]) for found in times.values()]


def error(recurrence: Recurrence, state: Tensor) -> float:
    """Of o, relative to the largest, against float64."""
    with torch.no_grad():
        double = replace(recurrence, **{name: s.double() for name, s in recurrence.streams.items()})
        wanted, found = evaluate(double, state.double())[0], evaluate(recurrence, state)[0]
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def measure(
    name: str, recurrence: Recurrence, repeats: int, clock: Callable[[], float]
) -> dict[str, object]:
    b, _, h = recurrence.shape
    state = torch.randn(b, h, *recurrence.state_shapes[0][2:])
    native = kernels.select(recurrence).name
    stepping = len(recurrence) == 1
    names = [native, "step (torch)" if stepping else FALLBACK[native]]
    found: dict[str, object] = {"record": name, "kernels": names, "error": error(recurrence, state)}
    for label, run in [("forward", forward)] + [("forward+backward", both)] * (not stepping):
        ms = medians(
            lambda kernel, run=run: run(recurrence, state, kernel),
            names,
            repeats * (1 + 9 * stepping),
            clock,
        )
        found[label] = {"ms": [round(x, 4) for x in ms], "ratio": round(ms[1] / ms[0], 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="records whose name has this in it")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    rows = [
        measure(name, record, options.repeats, clock)
        for name, record in records()
        if options.only in name
    ]
    about = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.platform(),
    }
    json.dump({**about, **vars(options), "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
