"""What `fastweights plan` computes, beside what is measured on this machine's CPU.

    python benchmarks/plan.py operations memory costs times

writes benchmarks/results/plan/PART.json. Memory and operations may be measured beside other work;
times want a quiet machine, and hold within one run only.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights import kernels
from fastweights.budget import (
    ACCELERATORS,
    CPU,
    NoRoomError,
    Placing,
    count_operations,
    device_memory,
    plan_fitting,
)
from fastweights.lab.bench.memory import peak_growth
from fastweights.lab.bench.report import open_report
from fastweights.lab.bench.timing import Budget, WallClock, require_all, time_in_turn
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes import (
    ConversionRecipe,
    Recipe,
    TrainingRecipe,
    find_recipe,
    plan_conversion,
    record_of,
)
from fastweights.training.loop.optimizers import AdamW
from fastweights.training.loop.stage import go_backward
from measuring import RESULTS

Row = dict[str, Any]

MIXERS = ("metala", "gated_deltanet", "mesa", "mamba2", "softmax")
COUNTED = (*MIXERS, "gla", "deltanet", "linear", "retnet")
STEPS = 2
"""From the second on there is all that the optimiser keeps."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of the C library's allocator, by which it gives freed memory back at once."""
PRICES = {"rtx4090": 0.5, "a100": 1.6, "h100": 2.5, "h200": 3.2, "b200": 5.0}
"""Of an hour, in dollars: assumed, of the order that is asked in 2025 and 2026."""
COSTED = (
    *("metala-360m", "metala-1.4b", "metala-3b", "mesanet-140m-15b", "mesanet-140m"),
    *("mesanet-440m-15b", "mesanet-440m", "mesanet-940m-15b", "mesanet-940m", "lolcats-8b"),
    *("lolcats-8b-workshop", "lolcats-mistral-7b-t2r"),
)
"""The recipes whose costs stand on the page."""
FOLLOWING = ("total_operations", "hours", "device_hours", "cost")


@dataclass(frozen=True)
class Case:
    """A small training, of which everything is measured."""

    mixer: str
    width: int = 256
    layers: int = 4
    batch: int = 4
    length: int = 512
    accumulate: int = 1
    bf16: bool = False
    recompute: bool = False
    vocabulary: int = 256

    @property
    def config(self) -> FastWeightsConfig:
        return FastWeightsConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            mixers=[{"name": self.mixer}],
        )

    def stepper(self) -> Callable[[], None]:
        """A function that makes a step of training."""
        model = FastWeightsForCausalLM(self.config).train()
        optimizers = AdamW().build(model)
        if self.recompute:
            model.gradient_checkpointing_enable()

        def step() -> None:
            for _ in range(self.accumulate):
                ids = torch.randint(self.vocabulary, (self.batch, self.length))
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    loss = model(input_ids=ids, labels=ids).loss
                    go_backward(loss / self.accumulate)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step


def memory_cases() -> Iterator[Case]:
    for mixer in MIXERS:
        yield Case(mixer)
    yield Case("metala", accumulate=2)
    yield Case("metala", bf16=True)
    yield Case("gated_deltanet", bf16=True)
    yield Case("metala", layers=8, batch=8, recompute=True)
    yield Case("metala", width=512, batch=2, length=1024, vocabulary=8192)
    yield Case("softmax", width=512, batch=2, length=1024, vocabulary=8192)
    yield Case("metala", width=768, batch=4, length=1024, vocabulary=8192)


def measure_memory() -> Iterator[Row]:
    """The growth of resident memory over some steps, each in a process of its own."""
    for case in memory_cases():
        placing = Placing(recompute=case.recompute, bf16=case.bf16)
        shape = case.batch, case.length, case.accumulate
        yield {
            **asdict(case),
            "resident": peak_growth(partial(ready, case, False)),
            "given_back": peak_growth(partial(ready, case, True)),
            "planned": device_memory(case.config, placing, CPU, *shape).total,
        }


def ready(case: Case, give_back: bool) -> Callable[[], None]:
    """The steps in this process, which has everything loaded."""
    torch.set_num_threads(1)
    if give_back:
        library = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            library.mallopt(option, 1 << 16)
    warm = replace(case, width=64, layers=1, batch=1, length=64).stepper()
    warm()
    warm()
    del warm
    gc.collect()
    return partial(make_steps, case)


def make_steps(case: Case) -> None:
    step = case.stepper()
    for _ in range(STEPS):
        step()


def measure_operations() -> Iterator[Row]:
    """Operations of torch's products in a step, where recurrences go by torch's chunk loop."""
    for mixer in COUNTED:
        case = Case(mixer, width=128, layers=2, batch=2)
        tokens, planned = case.batch * case.length, count_operations(case.config, case.length)
        model = FastWeightsForCausalLM(case.config).train()
        ids = torch.zeros(case.batch, case.length, dtype=torch.long)
        with kernels.only("chunk loop (torch)"):
            with FlopCounterMode(display=False) as forward:
                loss = model(input_ids=ids, labels=ids).loss
            with FlopCounterMode(display=False) as backward:
                loss.backward()
        yield {
            "mixer": mixer,
            "planned_products": planned.projections + planned.head,
            "planned_recurrent": planned.recurrent,
            "planned_backward": planned.backward,
            "forward": forward.get_total_flops() / tokens,
            "backward": backward.get_total_flops() / tokens,
        }


def time_cases() -> Iterator[Case]:
    yield Case("metala", width=512, layers=4)
    yield Case("metala", width=384, layers=6)
    yield Case("metala", width=512, layers=8)
    yield Case("metala", width=512, layers=4, length=1024, batch=2)
    yield Case("metala", width=768, layers=4)
    for mixer in MIXERS[1:]:
        yield Case(mixer, width=512)


def measure_times() -> Iterator[Row]:
    """Seconds of steps in turn: the first case's utilisation predicts the others."""
    torch.manual_seed(0)
    steps = {case: case.stepper() for case in time_cases()}
    named = {str(number): step for number, step in enumerate(steps.values())}
    times = time_in_turn(named, WallClock(), Budget(seconds=1e9, runs=3))
    pairs = zip(steps, require_all(times).values(), strict=True)
    found = {case: one.median for case, one in pairs}
    first = next(iter(found))
    rate = _operations(first) / found[first]
    for case, seconds in found.items():
        yield {**asdict(case), "seconds": seconds, "predicted": _operations(case) / rate}


def _operations(case: Case) -> float:
    done = count_operations(case.config, case.length)
    return float(done.forward + done.backward) * case.batch * case.length * case.accumulate


def compute_costs() -> Iterator[Row]:
    """The papers' own models on every device, as many as were published or we chose."""
    for recipe in map(find_recipe, COSTED):
        for device in PRICES:
            yield {"recipe": recipe.name, "device": device, **_cost(recipe, device)}


def _cost(recipe: Recipe, device: str) -> Row:
    placing = Placing(recipe.devices.value, bf16=True)
    workload = replace(recipe.workload(placing), device=ACCELERATORS[device], price=PRICES[device])
    try:
        found = _plan(recipe, workload)
    except NoRoomError:
        return {"devices": recipe.devices.value, "hours": None, "cost": None}
    record = record_of(found)
    memory, placing = record["memory"], found.workload.placing
    return {
        "devices": placing.devices,
        "shard": placing.shard,
        "recompute": placing.recompute,
        "memory": memory["total"] if isinstance(memory, dict) else memory,
        "sequences": record["sequences"],
        "accumulate": record["accumulate"],
        **{name: record[name] for name in FOLLOWING},
    }


def _plan(recipe: Recipe, workload: Any) -> Any:
    if isinstance(recipe, ConversionRecipe):
        return plan_conversion(recipe, workload)
    assert isinstance(recipe, TrainingRecipe)
    return plan_fitting(recipe.config(), workload)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "operations": measure_operations,
    "memory": measure_memory,
    "costs": compute_costs,
    "times": measure_times,
}


def main(parts: list[str]) -> None:
    for part in parts or list(PARTS):
        settings = {"prices": PRICES} if part == "costs" else {}
        report = open_report(part, RESULTS / "plan" / f"{part}.json", settings)
        if not report.has(part):
            report.add(part, list(PARTS[part]()))


if __name__ == "__main__":
    main(sys.argv[1:])
