"""Mesa's Triton kernels under torch.compile, in the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.triton.mesa import TRITON_MESA
from fastweights.recurrence import ConjugateGradient, Mesa

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

import triton_interpreter


def run(**given: Tensor) -> Tensor:
    record = Mesa(**given, solver=ConjugateGradient(4))
    return TRITON_MESA.compute(record, record.initial_state())[0]


def differentiate(run: Callable[..., Tensor], given: dict[str, Tensor]) -> list[Tensor]:
    o = run(**given)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), list(given.values()))]


def main() -> None:
    triton_interpreter.install()  # Triton's own interpreter computes with bfloat16's bits
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 34, 1, 16).unbind()
    beta, log_decay = torch.rand(1, 34, 1, 1), -torch.rand(1, 34, 1, 1)
    given = {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": v,
        "beta": beta,
        "log_decay": log_decay,
        "ridge": 0.5 + torch.rand(1, 16),
    }
    given = {name: s.requires_grad_() for name, s in given.items()}
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, wanted = differentiate(compiled, given), differentiate(run, given)
    assert all(b.isfinite().all() for b in wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


if __name__ == "__main__":
    main()
