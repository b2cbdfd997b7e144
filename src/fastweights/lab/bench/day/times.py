"""The stage `times`: ours and flash-linear-attention, in turn, forward and backward apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fastweights.lab.bench.cases import mesa_case
from fastweights.lab.bench.contenders import (
    Implementation,
    Inputs,
    Phase,
    Sizes,
    TensorFunction,
    dtype_name,
)
from fastweights.lab.bench.day.plan import DayPlan, draw
from fastweights.lab.bench.day.rows import ResidualRow, TimeRow
from fastweights.lab.bench.day.tuning import short_tuning
from fastweights.lab.bench.machine import Ceilings
from fastweights.lab.bench.ops import errors_on
from fastweights.lab.bench.peers import is_miscompiled, mesa_in_steps
from fastweights.lab.bench.problems import Problem
from fastweights.lab.bench.timing import (
    Failure,
    Function,
    Times,
    clock_of,
    time_in_turn,
    timed,
)
from fastweights.recurrence import ConjugateGradient

FORWARD, BACKWARD, REPLAY = "forward", "backward", "forward, graph replay"
ROUNDS = 2
STEPS = (5, 10, 15, 20, 30)
"""Of Mesa's solver, of which the fewest that are accurate enough are compared."""


def time_problem(problem: Problem, plan: DayPlan, ceilings: Ceilings) -> Iterator[TimeRow]:
    """Yield the times of our kernel and of other libraries' for CUDA, each twice."""
    inputs = draw(problem, plan.place)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with short_tuning():
        yield from _Timing(problem, plan, ceilings, FORWARD, _forward).rows(inputs)
        yield from _Timing(problem, plan, ceilings, BACKWARD, _backward).rows(leaves)


def time_replays(problem: Problem, plan: DayPlan, ceilings: Ceilings) -> Iterator[TimeRow]:
    """Yield the times of a forward pass by a CUDA graph, for which the host does nothing."""
    inputs = draw(problem, plan.place)
    with short_tuning():
        yield from _Timing(problem, plan, ceilings, REPLAY, _replay).rows(inputs)


def _forward(run: TensorFunction, inputs: Inputs) -> Function:
    return torch.no_grad()(lambda: run(inputs))


def _backward(run: TensorFunction, inputs: Inputs) -> Function:
    """Of one forward pass, again and again."""
    o = run(inputs)
    upstream, leaves = torch.randn_like(o), list(inputs.values())
    return lambda: torch.autograd.grad(o, leaves, upstream, retain_graph=True, allow_unused=True)


def _replay(run: TensorFunction, inputs: Inputs) -> Function:
    """On a CPU there is nothing to capture."""
    forward = _forward(run, inputs)
    if not next(iter(inputs.values())).is_cuda:
        return forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


Bind = Callable[[TensorFunction, Inputs], Function]


@dataclass(frozen=True)
class _Timing:
    """One phase of one problem."""

    problem: Problem
    plan: DayPlan
    ceilings: Ceilings
    phase: str
    bind: Bind

    def rows(self, inputs: Inputs) -> Iterator[TimeRow]:
        case = self.problem.case
        contenders = [case.implementations(inputs)[0], *case.gpu_peers]
        calls: dict[str, Function] = {}
        peaks: dict[str, int | None] = {}
        for contender in contenders:
            try:
                calls[contender.name] = self.bind(contender.load(), inputs)
                peaks[contender.name] = _peak(calls[contender.name], self.plan.place)
            except Exception as error:
                calls.pop(contender.name, None)
                yield replace(self._row(contender, 0), note=Failure.of(error).reason)
        for turn in range(ROUNDS):
            found = time_in_turn(calls, clock_of(self.plan.place), self.plan.budget)
            for contender in contenders:
                if contender.name in found:
                    row = self._timed(contender, turn, found[contender.name], inputs)
                    extra: dict[str, Any] = (
                        self._looked_into(calls[contender.name]) if turn == 0 else {}
                    )
                    yield replace(row, peak_bytes=peaks[contender.name], **extra)

    def _row(self, contender: Implementation, turn: int) -> TimeRow:
        problem = self.problem
        wrong = self.phase == BACKWARD and is_miscompiled(contender, self.plan.place)
        return TimeRow(
            op=problem.name,
            sizes=problem.sizes,
            dtype=dtype_name(problem.dtype),
            phase=self.phase,
            contender=contender.name,
            library=contender.library,
            round=turn,
            wrong=wrong,
        )

    def _timed(
        self, contender: Implementation, turn: int, found: Times | Failure, inputs: Inputs
    ) -> TimeRow:
        row = replace(self._row(contender, turn), **timed(found, None))
        if isinstance(found, Failure):
            return row
        rate = self._bytes(inputs) / found.median / self.ceilings.bandwidth
        return replace(row, bandwidth=rate)

    def _bytes(self, inputs: Inputs) -> float:
        """The least that this phase reads and writes."""
        problem = self.problem
        values = 1 if problem.case.channels else problem.sizes.v
        output = problem.sizes.tokens * values * problem.dtype.itemsize
        forward, both = (
            problem.case.work(inputs, output, problem.sizes, phase).bytes for phase in Phase
        )
        return both - forward if self.phase == BACKWARD else forward

    def _looked_into(self, call: Function) -> dict[str, object]:
        """The host's seconds, and the milliseconds of each kernel."""
        device = self.plan.place
        return {"host": host_seconds(call, device), "kernels": kernel_times(call, device)}


def host_seconds(call: Function, device: torch.device, calls: int = 20) -> float:
    """Return the seconds after which a call returns that does not wait for the device."""
    taken = []
    for _ in range(calls if device.type == "cuda" else 1):
        _wait(device)
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


def kernel_times(call: Function, device: torch.device, calls: int = 3) -> dict[str, float]:
    """Return the milliseconds per call of every kernel, the slowest first."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        for _ in range(calls):
            call()
        _wait(device)
    taken = "self_device_time_total" if cuda else "self_cpu_time_total"
    found = {e.key: getattr(e, taken) / 1e3 / calls for e in seen.key_averages()}
    slowest = sorted(found.items(), key=lambda item: -item[1])[:24]
    return {name[:80]: round(ms, 5) for name, ms in slowest if ms > 0}


def _peak(call: Function, device: torch.device) -> int | None:
    """Of memory in the second call: the first compiles and tunes."""
    call()
    if device.type != "cuda":
        return None
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def residuals(plan: DayPlan) -> Iterator[ResidualRow]:
    """Yield what Mesa's steps take and how far they get, ours and flash-linear-attention's."""
    problem = plan.problem("mesa 30 steps", plan.main)
    inputs, short = draw(problem, plan.place), _short(problem, plan)
    for steps in STEPS:
        for contender in (_our_mesa(steps, inputs), mesa_in_steps(steps)):
            with short_tuning():
                yield _residual(contender, steps, inputs, short, plan)


def _our_mesa(steps: int, inputs: Inputs) -> Implementation:
    return mesa_case(ConjugateGradient(steps)).implementations(inputs)[0]


def _short(problem: Problem, plan: DayPlan) -> Inputs:
    """Few enough tokens for the exact solver."""
    sizes: Sizes = problem.sizes._replace(b=1, t=min(plan.main.t, 512), h=2)
    return draw(problem._replace(sizes=sizes), plan.place)


def _residual(
    contender: Implementation, steps: int, inputs: Inputs, short: Inputs, plan: DayPlan
) -> ResidualRow:
    row = ResidualRow("mesa", contender.name, contender.library, steps, None, None, None)
    try:
        run = contender.load()
        exact = mesa_case(ConjugateGradient(steps))
        row = replace(row, error=errors_on(exact, run, short).output)
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        calls = {FORWARD: _forward(run, inputs), BACKWARD: _backward(run, leaves)}
    except Exception as error:
        return replace(row, note=Failure.of(error).reason)
    found = time_in_turn(calls, clock_of(plan.place), plan.budget)
    notes = "; ".join(f.reason for f in found.values() if isinstance(f, Failure))
    seconds = {p: f.median if isinstance(f, Times) else None for p, f in found.items()}
    return replace(row, forward=seconds[FORWARD], backward=seconds[BACKWARD], note=notes)
