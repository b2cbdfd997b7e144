"""Gradients of the gradients of Triton's kernels beside those of definitions in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.kernels import Kernel, only
from fastweights.kernels.triton import TRITON
from fastweights.methods import Recurrent, evaluate
from fastweights.ops import convolve
from fastweights.recurrence import (
    DPLR,
    Decay,
    Delta,
    Mesa,
    Normalized,
    Selective,
    WindowedLinear,
)
from fastweights.recurrence.streams import state_parts
from poison import poisoned_memory
from triton_checks import relative

BY_NAME = {kernel.name: kernel for kernel in TRITON}
Streams = dict[str, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw(*, k: int = 8, v: int = 8, t: int = 19) -> Streams:
    torch.manual_seed(0)
    drawn = {name: normal(1, t, 2, k) / k**0.5 for name in ("q", "k", "w", "a", "fq", "fk")}
    one = torch.rand(1, t, 2, 1, dtype=torch.float64)
    drawn |= {"beta": one, "mix": one, "log_decay": -torch.rand(1, t, 2, k, dtype=torch.float64)}
    drawn |= {"v": normal(1, t, 2, v), "rate": drawn["k"][:1, :1].exp(), "ridge": one + 1}
    return drawn | {"step": -one}


CASES: dict[str, tuple[Callable[[Streams], Any], dict[str, int]]] = {
    "decay (Triton)": (lambda s: Decay(s["q"], s["k"], s["v"], s["log_decay"]), {}),
    "normalised decay (Triton)": (
        lambda s: Normalized(Decay(s["q"].exp(), s["k"].exp(), s["v"], s["log_decay"])),
        {},
    ),
    "delta (Triton)": (lambda s: Delta(s["q"], s["k"], s["v"], s["beta"], s["log_decay"]), {}),
    "DPLR (Triton)": (
        lambda s: DPLR(s["q"], s["w"], s["v"], s["a"], None, s["log_decay"]),
        {},
    ),
    "scan (Triton)": (lambda s: Decay(s["q"], s["k"], s["v"], s["log_decay"]), {"v": 1}),
    "selective scan (Triton)": (
        lambda s: Selective(s["q"], s["k"], s["v"], s["step"], s["rate"]),
        {"v": 1},
    ),
    "mesa (Triton)": (
        lambda s: Mesa(s["q"], s["k"], s["v"], s["beta"], s["step"], s["ridge"]),
        {},
    ),
    "window and linear memory (Triton)": (
        lambda s: WindowedLinear(
            *(s["q"], s["k"], s["v"], s["fq"].exp(), s["fk"].exp(), s["mix"], 5)
        ),
        {},
    ),
}


def products(evaluated: Callable[[Streams], tuple[Tensor, ...]], streams: Streams) -> list[Tensor]:
    """A Hessian times ones, of streams that are read."""
    leaves = {name: s.clone().requires_grad_() for name, s in streams.items()}
    outputs = [o for o in evaluated(leaves) if o.requires_grad]
    size = torch.stack([o.sin().sum().to(outputs[0].dtype) for o in outputs]).sum()
    read = [*leaves.values()]
    slopes = torch.autograd.grad(size, read, create_graph=True, allow_unused=True)
    along = torch.stack([slope.sum() for slope in slopes if slope is not None]).sum()
    found = torch.autograd.grad(along, read, allow_unused=True)
    return [f for f in found if f is not None]


ROUNDING = 2e-4
"""Of second derivatives in float32, whose parts cancel; torch 2.8 and 2.13 round differently."""
LONG = ("scan (Triton)", "selective scan (Triton)")
"""A minute each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES]
)
def test_rules(name: str) -> None:
    (build, sizes), kernel = CASES[name], BY_NAME[name]
    streams = draw(**sizes)

    def by_kernel(streams: Streams) -> tuple[Tensor, ...]:
        record = build(streams)
        assert kernel.refuses(record) is None
        o, last = kernel.compute(record, record.initial_state())
        return o, *state_parts(last)

    def by_definition(streams: Streams) -> tuple[Tensor, ...]:
        o, last = evaluate(build(streams), None, Recurrent())
        return o, *state_parts(last)

    with poisoned_memory():
        found = products(by_kernel, {n: s.float() for n, s in streams.items()})
    wanted = products(by_definition, streams)
    for got, want in zip(found, wanted, strict=True):
        assert relative(got, want) < ROUNDING


def test_every_kernel_with_gradients_is_tried() -> None:
    with_gradients = {kernel.name for kernel in TRITON if "one token" not in kernel.name}
    assert with_gradients == CASES.keys()
    assert all(kernel.opaque for kernel in map(_by_name, CASES))


def _by_name(name: str) -> Kernel:
    return BY_NAME[name]


def test_convolutions() -> None:
    torch.manual_seed(0)
    sizes = {"tail": (2, 3, 5), "x": (2, 17, 5), "taps": (4, 5), "bias": (5,)}
    streams = {name: normal(*shape) for name, shape in sizes.items()}

    def convolved(s: Streams) -> tuple[Tensor, ...]:
        return convolve(s["tail"], s["x"], s["taps"], None, s["bias"], silu=True)

    with only("short convolution (Triton)"):
        found = products(convolved, {n: s.float() for n, s in streams.items()})
    with only("short convolution (torch)"):
        wanted = products(convolved, streams)
    for got, want in zip(found, wanted, strict=True):
        assert relative(got, want) < ROUNDING
