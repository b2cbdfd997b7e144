"""Slices of sequences on several processes: bytes that a process sends per layer, beside ring
attention's and Ulysses', and a training step with its memory.

    python benchmarks/sequence_parallel.py [--tokens 65536] [--processes 1 2 4]
        [--mixers metala gated_deltanet mamba2 rwkv4]

Bytes are counted around the collectives, forward and backward, of one layer of d = 64 in float32 on
one sequence. A step is the forward and backward of a model of two such layers on one sequence;
memory is the most that the process held (its resident set) beyond what it held before.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from fastweights import MIXERS, FastWeightsConfig, FastWeightsForCausalLM
from fastweights.methods import Auto, Method
from fastweights.parallel import (
    HeadSharded,
    TimeSharded,
    divide,
    record_messages,
    sum_gradients,
    use_method,
)
from measuring import begin, options

D, VOCABULARY, LAYERS = 64, 256, 2
FLOAT = 4
LENGTHS = (1024, 4096, 16384)
BYTES_OF = ("metala", "gated_deltanet", "mamba2", "mesa", "rwkv4", "mlstm", "lolcats")


def ring_bytes(t: int, processes: int) -> int:
    """K and V travel past every process, and on the way back with their gradients (Ring Attention,
    2310.01889).
    """
    return (2 + 4) * FLOAT * D * t // processes * (processes - 1)


def ulysses_bytes(t: int, processes: int) -> int:
    """q, k, v and o change their places once forward, and their gradients once backward (Ulysses,
    2309.14509).
    """
    return (4 + 4) * FLOAT * D * t // processes * (processes - 1) // processes


def count_bytes(name: str, t: int, method: Method) -> int:
    """What this process sends for one layer, forward and backward, of a sequence of t tokens."""
    torch.manual_seed(0)
    mixer, count = MIXERS[name](d=D), distributed.get_world_size()
    x = torch.randn(1, t // count, D, requires_grad=True)
    with record_messages() as messages:
        mixer(x, method=method)[0].sum().backward()
    return sum(message.sent for message in messages)


def measure_bytes(**_: Any) -> list[dict[str, Any]]:
    count, group = distributed.get_world_size(), distributed.group.WORLD
    methods = {
        "TimeSharded": TimeSharded(group),
        "HeadSharded": HeadSharded(group, gathers_state=False),
    }
    return [
        {
            "part": "traffic",
            "mixer": name,
            "method": method,
            "tokens": t,
            "processes": count,
            "sent": count_bytes(name, t, methods[method]),
            "ring": ring_bytes(t, count),
            "ulysses": ulysses_bytes(t, count),
        }
        for method in methods
        for name in BYTES_OF
        if method == "TimeSharded" or name in ("metala", "mesa")
        for t in LENGTHS
    ]


def held() -> int:
    """The most bytes that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_step(name: str, tokens: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    count, group = distributed.get_world_size(), distributed.group.WORLD
    config = FastWeightsConfig(
        vocab_size=VOCABULARY, hidden_size=D, num_hidden_layers=LAYERS, mixers=[{"name": name}]
    )
    model = FastWeightsForCausalLM(config).train()
    ids = torch.randint(VOCABULARY, (1, tokens))
    method = TimeSharded(group) if count > 1 else Auto()
    step(model, method, ids[:, : 64 * count])
    before, begin, used = held(), time.perf_counter(), time.process_time()
    loss = step(model, method, ids)
    return [
        {
            "part": "step",
            "mixer": name,
            "tokens": tokens,
            "processes": count,
            "loss": loss,
            "gradient": float(sum(p.grad.double().square().sum() for p in model.parameters())),
            "seconds": time.perf_counter() - begin,
            "processor_seconds": time.process_time() - used,
            "bytes": held() - before,
        }
    ]


def step(model: FastWeightsForCausalLM, method: Method, ids: torch.Tensor) -> float:
    """A forward and a backward; the mean loss."""
    group: Any = distributed.group.WORLD
    model.zero_grad()
    with use_method(model, method):
        batch = {"input_ids": ids, "labels": ids}
        loss = model(**(batch if isinstance(method, Auto) else divide(batch, group))).loss
        loss.backward()
    sum_gradients(model.parameters(), group)
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    return float(mean)


def on_processes(
    count: int, measure: Callable[..., list[dict[str, Any]]], **given: Any
) -> list[dict[str, Any]]:
    """The rows of the first process."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_take_part, (count, folder, measure, given), nprocs=count)
        return json.loads(Path(folder, "rows.json").read_text())


def _take_part(
    rank: int,
    count: int,
    folder: str,
    measure: Callable[..., list[dict[str, Any]]],
    given: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    rows = measure(**given)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    distributed.destroy_process_group()


def main() -> None:
    parser = options(__doc__, "sequence_parallel")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--mixers", nargs="+", default=["metala", "gated_deltanet", "mamba2", "rwkv4"]
    )
    chosen = parser.parse_args()
    sizes = {"d": D, "layers": LAYERS, "vocabulary": VOCABULARY, "dtype": "float32"}
    report = begin("sequence_parallel", chosen, **sizes)
    for count in chosen.processes:
        if count > 1 and not report.has(group := f"traffic, {count} processes"):
            report.add(group, on_processes(count, measure_bytes))
        for name in chosen.mixers:
            if not report.has(group := f"step of {name}, {count} processes"):
                rows = on_processes(count, measure_step, name=name, tokens=chosen.tokens)
                report.add(group, rows)


if __name__ == "__main__":
    main()
