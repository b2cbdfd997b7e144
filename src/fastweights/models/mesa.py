"""What the Mesa layers of a model have in common: their solver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fastweights.mixers import MesaLayer
from fastweights.recurrence import ConjugateGradient, Solver


def mesa_layers(model: nn.Module) -> list[MesaLayer]:
    """The Mesa layers in order; raises ValueError if there is none."""
    found = [module for module in model.modules() if isinstance(module, MesaLayer)]
    if not found:
        raise ValueError(
            f"this {type(model).__name__} has no Mesa layer: there is nothing to be solved"
        )
    return found


def set_tolerance(model: nn.Module, tol: float) -> None:
    """Let conjugate gradients stop at this relative residual, each token on its own (MesaNet sec.
    6: 1e-4).
    """
    for layer in mesa_layers(model):
        steps = (
            layer.solver.max_steps
            if isinstance(layer.solver, ConjugateGradient)
            else ConjugateGradient().max_steps
        )
        layer.solver = ConjugateGradient(steps, tol)


@contextmanager
def use_solver(model: nn.Module, solver: Solver) -> Iterator[None]:
    """Inside the block all Mesa layers use `solver`."""
    before = [(layer, layer.solver) for layer in mesa_layers(model)]
    try:
        for layer, _ in before:
            layer.solver = solver
        yield
    finally:
        for layer, own in before:
            layer.solver = own
