"""The scan in Triton beside the definition of `Decay`: every way in which streams are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.triton.chips import CHIPS, Chip, pretend
from fastweights.kernels.triton.scan import SCAN_KERNEL, SELECTIVE_SCAN_KERNEL
from fastweights.recurrence import Decay, Selective
from triton_checks import check

pytestmark = pytest.mark.sampled

SMALL = Chip(90, 0, 227 << 10)
"""Any number of programs fills it: time stays in one piece."""
HUGE = CHIPS[90]
"""Nothing here fills it: time is cut into segments."""
ONE = torch.ones(1, 1, 1, 1, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gates(*shape: int) -> Tensor:
    return F.logsigmoid(normal(*shape))


def turns(*shape: int) -> Tensor:
    """Complex log decays."""
    return torch.complex(gates(*shape), normal(*shape))


def numbers(*shape: int) -> Tensor:
    return torch.complex(normal(*shape), normal(*shape))


def decay(streams: dict[str, Tensor]) -> Decay:
    return Decay(streams["q"], streams.get("k"), streams["v"], streams["log_decay"])


Streams = dict[str, Tensor]
LAYERS: dict[str, Callable[[int], Streams]] = {
    "hgrn": lambda t: {"q": ONE, "v": normal(1, t, 3, 1), "log_decay": gates(1, t, 3, 1)},
    "qlstm": lambda t: {
        "q": normal(1, t, 2, 1),
        "k": normal(1, t, 2, 1),
        "v": normal(1, t, 2, 1),
        "log_decay": gates(1, t, 2, 1),
    },
    "rwkv4": lambda t: {
        "q": normal(1, t, 2, 1),
        "k": normal(1, t, 2, 1),
        "v": normal(1, t, 2, 2),
        "log_decay": gates(1, t, 2, 1),
    },
    "rwkv4_channel": lambda t: {
        "q": ONE,
        "k": ONE,
        "v": normal(1, t, 1, 4),
        "log_decay": gates(1, 1, 1, 1),
    },
    "mamba": lambda t: {
        "q": normal(1, t, 1, 3),
        "k": normal(1, t, 1, 3),
        "v": normal(1, t, 3, 1),
        "log_decay": gates(1, t, 3, 3),
    },
    "own keys": lambda t: {
        "q": normal(1, t, 2, 2),
        "k": normal(1, t, 2, 2),
        "v": normal(1, t, 2, 2),
        "log_decay": gates(1, t, 2, 2),
    },
    "constant": lambda t: {
        "q": normal(1, 1, 2, 3),
        "k": normal(1, 1, 1, 3),
        "v": normal(2, t, 2, 1),
        "log_decay": gates(1, 1, 2, 3),
    },
}


COMPLEX: dict[str, Callable[[int], Streams]] = {
    "lru": lambda t: {
        "q": normal(1, 1, 2, 1),
        "k": normal(1, 1, 2, 1),
        "v": numbers(2, t, 2, 1),
        "log_decay": turns(1, 1, 2, 1),
    },
    "s4d": lambda t: {
        "q": numbers(1, 1, 2, 2),
        "k": numbers(1, 1, 2, 2),
        "v": normal(1, t, 2, 1),
        "log_decay": turns(1, 1, 2, 2),
    },
    "every token": lambda t: {
        "q": numbers(1, t, 1, 2),
        "k": normal(1, t, 2, 2),
        "v": numbers(1, t, 2, 1),
        "log_decay": turns(1, t, 2, 2),
    },
    "real writes": lambda t: {
        "q": numbers(1, t, 2, 1),
        "k": normal(1, t, 2, 1),
        "v": normal(1, t, 2, 1),
        "log_decay": gates(1, t, 2, 1),
    },
}


def mamba(t: int) -> Streams:
    return {
        "q": normal(1, t, 1, 3),
        "k": normal(1, t, 1, 3),
        "v": normal(1, t, 2, 1),
        "log_decay": gates(1, t, 2, 1),
        "rate": normal(1, 1, 2, 3).exp(),
    }


def selective(streams: Streams) -> Selective:
    return Selective(**streams)


def both_ways(layers: tuple[str, ...], cut: tuple[str, ...]) -> Any:
    """Each layer whole, and some every time in segments; the others are slow tests."""
    slow = pytest.mark.slow
    in_segments = [pytest.param(n, HUGE, marks=() if n in cut else slow) for n in layers]
    return pytest.mark.parametrize(("layer", "chip"), [*((n, SMALL) for n in layers), *in_segments])


@both_ways(tuple(LAYERS), ("hgrn", "mamba", "constant"))
def test_layers(layer: str, chip: Chip) -> None:
    """One token in one piece; more than two tiles of tokens in segments."""
    torch.manual_seed(0)
    with pretend(chip):
        tokens = 49 if LAYERS[layer](1)["q"].shape[-1] == 1 else 25
        check(SCAN_KERNEL, decay, LAYERS[layer](tokens if chip is HUGE else 1))


@both_ways(tuple(COMPLEX), ("lru", "every token"))
def test_complex_layers(layer: str, chip: Chip) -> None:
    torch.manual_seed(0)
    with pretend(chip):
        check(SCAN_KERNEL, decay, COMPLEX[layer](17 if chip is HUGE else 5))


def test_the_selective_scan_reads_both_factors_of_its_decay() -> None:
    torch.manual_seed(0)
    with pretend(SMALL):
        check(SELECTIVE_SCAN_KERNEL, selective, mamba(25), wide=("log_decay", "rate"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with pretend(SMALL):
        check(SCAN_KERNEL, decay, LAYERS["qlstm"](15), dtype)
        check(SELECTIVE_SCAN_KERNEL, selective, mamba(9), dtype, wide=("log_decay", "rate"))


def test_resets_and_steep_decays() -> None:
    torch.manual_seed(0)
    streams = mamba(25)
    streams["log_decay"][:, 3::7] = -torch.inf
    streams["log_decay"][:, 5::7] *= 1e4
    with pretend(HUGE):
        check(SELECTIVE_SCAN_KERNEL, selective, streams, wide=("log_decay", "rate"))


def test_the_state_before_the_first_token_may_be_empty() -> None:
    torch.manual_seed(0)
    with pretend(SMALL):
        check(SCAN_KERNEL, decay, LAYERS["hgrn"](15), state=False)


@pytest.mark.slow
def test_gradients_repeat_bit_by_bit() -> None:
    torch.manual_seed(0)
    streams = {n: s.float().requires_grad_() for n, s in mamba(18).items()}
    found = []
    for _ in range(2):
        record = selective(streams)
        o, _state = SELECTIVE_SCAN_KERNEL.compute(record, record.initial_state())
        found.append(torch.autograd.grad(o.square().sum(), list(streams.values())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def refusal(keys: int, values: int, dtype: torch.dtype = torch.float32) -> str | None:
    x, v = torch.zeros(1, 2, 1, keys, dtype=dtype), torch.zeros(1, 2, 1, values, dtype=dtype)
    return SCAN_KERNEL.refuses(Decay(x, x, v, x))


def test_large_states_are_for_matrix_products() -> None:
    assert refusal(64, 1) is None
    assert refusal(1, 300) is None
    assert refusal(2, 2) is None
    assert refusal(65, 1) == "its keys are 65 wide, more than 64"
    assert refusal(3, 2) == "its states have 3·2 elements per head, more than 4"
    assert refusal(64, 4, torch.complex64) is None
    assert refusal(1, 1, torch.float64) == "its q is torch.float64"
