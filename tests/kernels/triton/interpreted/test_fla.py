"""Kernels of flash-linear-attention in Triton's interpreter, where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import triton_interpreter
from fastweights.kernels import Kernel
from fastweights.kernels.external import FLA_GATED_DELTA, FLA_GLA, FLA_KDA, FLA_SIMPLE_GLA
from fastweights.recurrence import Decay, Delta
from fastweights.recurrence.base import Recurrence
from triton_checks import Streams, check

pytest.importorskip("einops", reason="flash-linear-attention needs einops")
pytest.importorskip("fla", reason="flash-linear-attention is not installed")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def streams(t: int, k: int, v: int, decays: int, *, resets: bool = False) -> Streams:
    q, key = (F.normalize(torch.randn(1, t, 2, k).double(), dim=-1) for _ in range(2))
    log_decay = F.logsigmoid(torch.randn(1, t, 2, decays).double() + 3)
    if resets:
        log_decay[:, 5::20] = -torch.inf
    value, beta = torch.randn(1, t, 2, v).double(), torch.rand(1, t, 2, 1).double()
    return {"q": q, "k": key, "v": value, "beta": beta, "log_decay": log_decay}


def decay(given: Streams) -> Decay:
    return Decay(*(given[n] for n in ("q", "k", "v", "log_decay")))  # type: ignore[arg-type]


def delta(given: Streams) -> Delta:
    return Delta(**given)  # type: ignore[arg-type]


CASES = [
    (FLA_SIMPLE_GLA, decay, 1),
    (FLA_GLA, decay, 32),
    (FLA_GATED_DELTA, delta, 1),
    (FLA_KDA, delta, 32),
]


def mend() -> None:
    """The modules that fla has imported by now."""
    triton_interpreter.number_as_tensors(
        module for name, module in list(sys.modules.items()) if name.startswith("fla.ops.")
    )


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("kernel", "build", "decays"), CASES)
def test_results_and_gradients(
    kernel: Kernel, build: Callable[[Streams], Recurrence], decays: int, resets: bool
) -> None:
    import fla.ops  # noqa: F401

    mend()
    given = streams(100, 32, 32, decays, resets=resets)
    if build is decay:
        given["beta"] = None
    check(kernel, build, given, torch.bfloat16)
