"""What the training loop costs beside its model, and several processes beside one.

    python benchmarks/processes.py

`overhead`: time of `Loop.update` over that of the bare step of the same model, which is forward,
backward, clipping and AdamW on a batch in memory; alternately in one process. `processes`: tokens
per second of 1, 2 and 4 processes on this machine, each with one thread, whole and divided.
`memory`: of a larger model, `held`, the bytes of weights and optimiser that a process has, and
`peak`, the most that it has held until three updates were made, above what imports take.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import psutil
import torch
from torch import nn

from fastweights.lab.bench.timing import Budget, WallClock, require_all, sample_in_turn
from fastweights.train import AdamW, Architecture, Text, TrainConfig
from fastweights.training.language.language_model import LanguageModelStage
from fastweights.training.loop.folder import create_run
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.loop import Loop, Session
from fastweights.training.loop.processes import join_processes, leave_processes
from measuring import Act, begin, options

LAYOUTS = {"replicated": Layout(), "divided": Layout(shard=True)}
SMALL = TrainConfig(
    text=Text(("shakespeare",)),
    model=Architecture(({"name": "metala"},), layers=4, width=256),
    optimizer=AdamW(),
    length=256,
    batch=8,
)
LARGE = replace(
    SMALL, model=Architecture(({"name": "metala"},), layers=8, width=768), length=64, batch=4
)
ROUNDS, UPDATES = 7, 3


def loop_of(config: TrainConfig, layout: Layout, folder: Path) -> Loop:
    """The loop of a run, ready to update."""
    processes = join_processes(torch.device("cpu"))
    with processes.first_then_others():
        create_run(folder, config)
        stage = LanguageModelStage(config, folder, Session(processes=processes, layout=layout))
        stage.prepare(folder)
    return Loop(stage, config, processes, layout)


def seconds(acts: dict[str, Act]) -> dict[str, list[float]]:
    """Of every call, in turn."""
    return require_all(sample_in_turn(acts, WallClock(), Budget(seconds=1e9, runs=ROUNDS)))


def measure_overhead(folder: Path) -> dict[str, float]:
    """The loop's update beside the bare step, round by round."""
    loop, bare = (loop_of(SMALL, Layout(), folder) for _ in range(2))
    batch = bare.stage._train.batch(0, SMALL.batch)
    model, (optimizer,) = bare.stage.model, bare.optimizers

    def step() -> None:
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def several(act: Act) -> None:
        for _ in range(UPDATES):
            act()

    found = seconds({"loop": lambda: several(loop.update), "bare": lambda: several(step)})
    ratios = [ours / theirs for ours, theirs in zip(found["loop"], found["bare"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "smallest": min(ratios),
        "largest": max(ratios),
        "milliseconds": 1e3 * statistics.median(found["loop"]) / UPDATES,
    }


def measure_speed(layout: Layout, folder: Path) -> dict[str, float]:
    """Tokens per second of all processes together, in one of them."""
    config = replace(SMALL, batch=8)
    loop = loop_of(config, layout, folder)
    times = seconds({"update": loop.update})["update"]
    return {"tokens_per_second": config.batch * config.length / statistics.median(times)}


def measure_memory(layout: Layout, folder: Path) -> dict[str, float]:
    """Bytes of this process above those of its imports."""
    join_processes(torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    loop = loop_of(LARGE, layout, folder)
    for _ in range(3):
        loop.update()
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    held = sum(
        t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes
        for t in (*loop.stage.model.parameters(), *loop.memory().values())
    )
    parameters = sum(p.numel() for p in loop.stage.model.parameters())
    return {"parameters": parameters, "held": held, "peak": peak}


WORK = {"speed": measure_speed, "memory": measure_memory}


def work(name: str, layout: str, folder: Path, result: Path) -> None:
    """Measure in one of several processes."""
    found = WORK[name](LAYOUTS[layout], folder)
    if os.environ.get("RANK", "0") == "0":
        result.write_text(json.dumps(found))
    leave_processes()


def launch(name: str, layout: str, count: int) -> dict[str, float]:
    """Measure in `count` processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        subprocess.run(
            [*launcher, __file__, "--work", name, layout, folder, str(result)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        return json.loads(result.read_text())


def main() -> None:
    parser = options(__doc__, "processes")
    parser.add_argument("--work", nargs=4)
    chosen = parser.parse_args()
    if chosen.work:
        name, layout, folder, result = chosen.work
        work(name, layout, Path(folder) / "run", Path(result))
        return
    report = begin("processes", chosen)
    if not report.has("overhead"):
        with tempfile.TemporaryDirectory() as folder:
            report.add("overhead", [measure_overhead(Path(folder) / "run")])
    for name, count, layout in product(WORK, (1, 2, 4), LAYOUTS):
        group = f"{name} of {count}, {layout}"
        if (count > 1 or layout == "replicated") and not report.has(group):
            row = {"part": name, "count": count, "layout": layout}
            report.add(group, [row | launch(name, layout, count)])


if __name__ == "__main__":
    main()
