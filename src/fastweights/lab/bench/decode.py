"""Benchmarks of decoding: a layer's step, a whole model's token, and how constant time and memory
stay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.generate import Decoder, stream
from fastweights.lab.bench.cases import CASES, RecurrenceCase
from fastweights.lab.bench.contenders import Inputs, Sizes, matching
from fastweights.lab.bench.machine import Ceilings
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import (
    Budget,
    Failure,
    Function,
    TimedRow,
    Times,
    clock_of,
    time_in_turn,
    timed,
)
from fastweights.methods import evaluate
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.presets import preset
from fastweights.recurrence.base import State
from fastweights.recurrence.streams import state_parts
from fastweights.render.plots import PALETTE, canvas, label, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (Sizes(1, 1, 8, 64, 64), Sizes(32, 1, 16, 128, 128))
CHANNELS = (Sizes(1, 1, 1024, 1, 1), Sizes(32, 1, 1024, 1, 1))
QUICK_SIZES = (Sizes(1, 1, 2, 16, 16),)
QUICK_CHANNELS = (Sizes(1, 1, 32, 1, 1),)
CONTEXT = 2048
BATCHES = (1, 32)
PRESET_NAMES = ("metala-360m", "mesanet-440m-gated-deltanet")
SKIPPED = ("decay vector steep", "softmax window 64", "scan complex", "mesa tol 1e-5")
FLAT = ("metala", "softmax")
COMPILED = "torch.compile"


@dataclass(frozen=True)
class DecodePlan:
    """The settings of the decoding benchmark.

    Attributes:
        tokens: Number of tokens over which time and memory are followed; 0 for none.
        compiled: Whether models are decoded by torch.compile too, which compiles for a minute or
            more each.
    """

    quick: bool = False
    only: str = "*"
    budget: Budget = Budget()
    tokens: int = 0
    compiled: bool = False

    def names(self) -> list[str]:
        """Return the names of all that is measured.

        Raises:
            ValueError: If there are none.
        """
        cases = [case.name for case in CASES if isinstance(case, RecurrenceCase)]
        presets = () if self.quick else PRESET_NAMES
        known = [name for name in (*cases, *MIXERS, *presets) if name not in SKIPPED]
        return matching(self.only, known, "nothing")

    @property
    def context(self) -> int:
        return 64 if self.quick else CONTEXT


@dataclass(frozen=True, kw_only=True)
class StepRow(TimedRow):
    """The time of one token through a rule (level "recurrence"), a mixer (projections included) or
    a model, compared with ours.

    Attributes:
        floor: Seconds in which the machine's bandwidth reads the weights once and the state twice
            (read, written).
        gemm: For a model, FLOPs of its products / seconds / the machine's rate, which limits many
            sequences at once.
    """

    level: str
    op: str
    sizes: str
    contender: str
    library: str
    floor: float | None
    over_floor: float | None
    gemm: float | None


@dataclass(frozen=True)
class FlatnessRow:
    """The time per token and the state of a model over many tokens.

    Attributes:
        tokens: Number of tokens at the end of each stretch.
        seconds: Median time per token in each stretch.
        state_bytes: Size of the cache at the end of each stretch.
        growth: The last stretch's time / the second's.
    """

    mixer: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    state_bytes: tuple[int, ...]
    growth: float


@dataclass(frozen=True)
class StepPeer:
    """Another library's function for one decoding step.

    Attributes:
        path: ``module:name`` of the function.
        use: Calls the function on inputs and a state ``[b h k v]``.
    """

    name: str
    path: str
    use: Callable[[Callable[..., Any], Inputs, Tensor], object]

    @property
    def library(self) -> str:
        return self.path.partition(".")[0]

    def bound(self, inputs: Inputs, state: Tensor) -> Function:
        module, _, attribute = self.path.partition(":")
        function = unwrap(getattr(import_module(module), attribute))
        return torch.no_grad()(lambda: self.use(function, inputs, state))


def _mamba2(f: Callable[..., Any], x: Inputs, state: Tensor) -> object:
    q, k, v, dt = x["q"][:, 0], x["k"][:, 0], x["v"][:, 0], -x["log_decay"][:, 0]
    return f(state, v, dt.expand_as(v), -torch.ones(1), k, q)


def _delta_with_gate(f: Callable[..., Any], x: Inputs, state: Tensor) -> object:
    g = x["log_decay"][..., 0]
    return f(
        x["q"],
        x["k"],
        x["v"],
        g=g,
        beta=x["beta"][..., 0],
        initial_state=state,
        output_final_state=True,
    )


def _kda(f: Callable[..., Any], x: Inputs, state: Tensor) -> object:
    return f(x["q"], x["k"], x["v"], x["log_decay"], x["beta"][..., 0], state, True)


def _mlstm(f: Callable[..., Any], x: Inputs, state: Tensor) -> object:
    gate = x["log_decay"][:, 0]
    n, m = state[..., 0], torch.zeros_like(gate)
    return f(x["q"][:, 0], x["k"][:, 0], x["v"][:, 0], gate, gate, state, n, m)


def _mesa(f: Callable[..., Any], x: Inputs, state: Tensor) -> object:
    q, k, v, g, beta = (x[n][:, 0] for n in ("q", "k", "v", "log_decay", "beta"))
    return f(q, k, v, g[..., 0], x["ridge"], beta[..., 0], state, state)


def _selective(f: Callable[..., Any], x: Inputs, state: Tensor) -> object:
    return f(state.squeeze(-1), x["x"][:, 0], x["delta"][:, 0], x["A"], x["B"][:, 0], x["C"][:, 0])


_MODELS = "transformers.models"
PEERS: dict[str, tuple[StepPeer, ...]] = {
    "decay scalar": (
        StepPeer(
            "Mamba-2 state update",
            f"{_MODELS}.mamba2.modeling_mamba2:mamba2_selective_state_update",
            _mamba2,
        ),
        StepPeer(
            "mLSTM step", f"{_MODELS}.xlstm.modeling_xlstm:mlstm_recurrent_step_native", _mlstm
        ),
    ),
    "delta scalar": (
        StepPeer(
            "gated delta step",
            f"{_MODELS}.qwen3_next.modeling_qwen3_next:torch_recurrent_gated_delta_rule",
            _delta_with_gate,
        ),
    ),
    "delta vector": (
        StepPeer(
            "KDA step",
            f"{_MODELS}.kimi_linear.modeling_kimi_linear:recurrent_kimi_delta_attention",
            _kda,
        ),
    ),
    "mesa 30 steps": (
        StepPeer("naive step", "fla.ops.mesa_net.naive:naive_mesa_net_decoding_one_step", _mesa),
    ),
    "selective scan": (
        StepPeer(
            "Mamba state update",
            f"{_MODELS}.mamba.modeling_mamba:mamba_selective_state_update",
            _selective,
        ),
    ),
}


def run_decode(report: Report, plan: DecodePlan, device: torch.device) -> None:
    """Measure one token of rules, mixers and models, and how constant its time stays."""
    wanted = plan.names()
    for case in CASES:
        if isinstance(case, RecurrenceCase) and case.name in wanted:
            sizes_of = (QUICK_SIZES, QUICK_CHANNELS) if plan.quick else (SIZES, CHANNELS)
            for sizes in case.sizes(*sizes_of):
                _measure_step(report, plan, case, sizes, device)
    for name in (name for name in MIXERS if name in wanted):
        for batch in BATCHES[:1] if plan.quick else BATCHES:
            _measure_mixer(report, plan, name, batch, device)
        measure_model(
            report, plan, name, partial(small_model, name, device, quick=plan.quick), (1,)
        )
    for name in (name for name in PRESET_NAMES if name in wanted):
        measure_model(report, plan, name, partial(preset_model, name, device), BATCHES)
    for name in FLAT:
        group = f"flatness {name} {plan.tokens}"
        if plan.tokens and name in wanted and not report.has(group):
            report.add(group, [flatness(name, plan, device)])


def _measure_step(
    report: Report, plan: DecodePlan, case: RecurrenceCase, sizes: Sizes, device: torch.device
) -> None:
    group = f"step {case.name} {sizes}"
    if report.has(group):
        return
    inputs, state = _before(case, sizes, plan.context, device)
    record = case.record(inputs)
    functions: dict[str, Function | Failure] = {
        "fastweights": torch.no_grad()(lambda: evaluate(record, state))
    }
    for peer in PEERS.get(case.name, ()):
        functions[peer.name] = _bound(peer, inputs, state)
    functions["SDPA with a cache"] = _attention(sizes, plan.context, device)
    moved = 2 * _nbytes(state) + sum(x.nbytes for x in inputs.values())
    named = "recurrence", case.name, str(sizes)
    report.add(group, list(_rows(*named, functions, TokenCost(moved), report, plan, device)))


def _before(
    case: RecurrenceCase, sizes: Sizes, context: int, device: torch.device
) -> tuple[Inputs, State]:
    """One token's inputs, and the state after a few tokens (softmax: after the whole context)."""
    length = context if case.name == "softmax" else 8
    past = case.inputs(sizes._replace(t=length), torch.float32, device)
    with torch.no_grad():
        _, state = evaluate(case.record(past))
    return case.inputs(sizes, torch.float32, device), state


def _bound(peer: StepPeer, inputs: Inputs, state: State) -> Function | Failure:
    memory = state[-1] if isinstance(state, tuple) else state
    try:
        return peer.bound(inputs, memory.clone())
    except Exception as error:
        return Failure.of(error)


def _attention(sizes: Sizes, context: int, device: torch.device) -> Function:
    """Softmax attention of one query to a cache as wide as the rule's streams."""
    heads, width = (sizes.h, sizes.k) if sizes.v > 1 else (max(sizes.h // 64, 1), 64)
    q = torch.randn(sizes.b, heads, 1, width, device=device)
    k, v = torch.randn(2, sizes.b, heads, context, width, device=device)
    return torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v))


def _nbytes(state: State) -> int:
    return sum(s.nbytes for s in state_parts(state))


class TokenCost(NamedTuple):
    """The least cost of one token: bytes read and written, and FLOPs of matrix products (0: not
    counted)."""

    bytes: int
    flops: float = 0.0


def _rows(
    level: str,
    op: str,
    sizes: str,
    functions: dict[str, Function | Failure],
    moved: TokenCost,
    report: Report,
    plan: DecodePlan,
    device: torch.device,
) -> Iterator[StepRow]:
    callable_ = {name: f for name, f in functions.items() if not isinstance(f, Failure)}
    times = time_in_turn(callable_, clock_of(device), plan.budget)
    ceilings = Ceilings(**report.ceilings)
    floor, products = moved.bytes / ceilings.bandwidth, moved.flops / ceilings.gemm(torch.float32)
    libraries = {"fastweights": "fastweights", COMPILED: "fastweights"} | {
        p.name: p.library for p in PEERS.get(op, ())
    }
    for name, function in functions.items():
        found = function if isinstance(function, Failure) else times[name]
        taken, ours = found if isinstance(found, Times) else None, name == "fastweights"
        yield StepRow(
            level=level,
            op=op,
            sizes=sizes,
            contender=name,
            library=libraries.get(name, "torch"),
            floor=floor if ours else None,
            over_floor=taken.median / floor if taken and ours else None,
            gemm=products / taken.median if taken and ours and products else None,
            **timed(found, times["fastweights"]),
        )


def _measure_mixer(
    report: Report, plan: DecodePlan, name: str, batch: int, device: torch.device
) -> None:
    d = 64 if plan.quick else 512
    group = f"mixer {name} b{batch} d{d}"
    if report.has(group):
        return
    torch.manual_seed(0)
    mixer = MIXERS[name](d=d).to(device).eval()
    x = torch.randn(batch, plan.context if name == "softmax" else 8, d, device=device)
    with torch.no_grad():
        _, state = mixer(x)
    moved = sum(p.nbytes for p in mixer.parameters()) + 2 * state.nbytes
    functions: dict[str, Function | Failure] = {
        "fastweights": torch.no_grad()(lambda: mixer(x[:, :1], state))
    }
    named = "mixer", name, f"b{batch} d{d}"
    report.add(group, list(_rows(*named, functions, TokenCost(moved), report, plan, device)))


def small_model(mixer: str, device: torch.device, *, quick: bool) -> FastWeightsForCausalLM:
    """Return the model that is decoded: four layers of width 256, or two of width 32 if `quick`."""
    torch.manual_seed(0)
    width, layers = (32, 2) if quick else (256, 4)
    config = FastWeightsConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=layers, mixers=[{"name": mixer}]
    )
    with torch.device(device):
        return FastWeightsForCausalLM(config).eval()


def preset_model(name: str, device: torch.device) -> FastWeightsForCausalLM:
    """A published architecture with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return FastWeightsForCausalLM(preset(name)).eval()


def measure_model(
    report: Report,
    plan: DecodePlan,
    name: str,
    build: Callable[[], FastWeightsForCausalLM],
    batches: Sequence[int],
) -> None:
    """Measure the tokens of a model, at each number of sequences."""
    groups = {batch: f"model {name} b{batch} quick={plan.quick}" for batch in batches}
    if all(map(report.has, groups.values())):
        return
    model = build()
    for batch, group in groups.items():
        if not report.has(group):
            report.add(group, list(_model_rows(report, plan, name, model, batch)))


def _model_rows(
    report: Report, plan: DecodePlan, name: str, model: FastWeightsForCausalLM, batch: int
) -> Iterator[StepRow]:
    prompt, decoder = torch.zeros(batch, 8, dtype=torch.long, device=model.device), Decoder(model)
    decoder.read(prompt)
    weights = set(model.parameters())
    count = sum(p.numel() for p in weights)
    moved = TokenCost(
        sum(p.nbytes for p in weights) + 2 * decoder.cache.nbytes, 2.0 * batch * count
    )
    functions: dict[str, Function | Failure] = {"fastweights": _tokens(model, prompt)}
    if plan.compiled:
        functions[COMPILED] = _tokens_by_compiler(model, prompt)
    yield from _rows(
        "model", name, f"b{batch} {count} parameters", functions, moved, report, plan, model.device
    )


def _tokens(model: FastWeightsForCausalLM, prompt: Tensor) -> Function:
    tokens = stream(model, prompt, temperature=0)
    return lambda: next(tokens)


def _tokens_by_compiler(model: FastWeightsForCausalLM, prompt: Tensor) -> Function | Failure:
    """The tokens of a copy, of which the prompt and the first two are done: these wait for the
    compiler.
    """
    torch.compiler.reset()
    model = deepcopy(model)
    model.compile()
    token = _tokens(model, prompt)
    try:
        for _ in range(3):
            token()
    except Exception as error:
        return Failure.of(error)
    return token


def flatness(name: str, plan: DecodePlan, device: torch.device, stretches: int = 40) -> FlatnessRow:
    """Follow the time per token and the state of a small model for `plan.tokens` tokens."""
    decoder = Decoder(small_model(name, device, quick=plan.quick))
    step = partial(decoder.read, torch.zeros(1, 1, dtype=torch.long, device=device))
    clock, length = clock_of(device), max(1, plan.tokens // stretches)
    ends, seconds, sizes = [], [], []
    for end in range(length, plan.tokens + 1, length):
        seconds.append(statistics.median(clock.sample(step, 1) for _ in range(length)))
        ends.append(end)
        sizes.append(decoder.cache.nbytes)
    growth = seconds[-1] / seconds[min(1, len(seconds) - 1)]
    return FlatnessRow(name, tuple(ends), tuple(seconds), tuple(sizes), growth)


def plot_flatness(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the time per token and the size of the state against the token.

    Times begin at 0. States are logarithmic, so that a small one is seen beside a cache.
    """
    figure, axes = canvas(1, 2, width=4.4, height=3.2)
    time, memory = axes[0]
    for row, color in zip(rows, PALETTE, strict=False):
        line = {"label": row["mixer"], "color": color, "linewidth": 1.8}
        time.plot(row["tokens"], [1e3 * s for s in row["seconds"]], **line)
        memory.plot(row["tokens"], [n / 1e3 for n in row["state_bytes"]], **line)
    label(time, "Time per token", "tokens generated", "milliseconds")
    label(memory, "Memory of the state", "tokens generated", "kilobytes, logarithmic")
    time.set(ylim=(0, None))
    memory.set(yscale="log", ylim=_decades(rows))
    for one in (time, memory):
        one.set_xlim(0, None)
        one.xaxis.set_major_formatter("{x:,.0f}")
    memory.yaxis.set_major_formatter("{x:,.7g}")
    legend(time)
    return figure


def _decades(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Powers of ten, in kilobytes, between which all states lie with room to be seen."""
    sizes = [max(1, n) / 1e3 for row in rows for n in row["state_bytes"]]
    least, most = math.log10(min(sizes) / 1.5), math.log10(max(sizes) * 1.5)
    return 10 ** math.floor(least), 10 ** math.ceil(most)
