"""What the Mesa layers of a model have in common: their solver, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fastweights.layers import TokenContext
from fastweights.mixers import MesaLayer
from fastweights.recurrence import ConjugateGradient, Mesa, Signed, Solver


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


@torch.no_grad()
def mesa_records(model: nn.Module, input_ids: Tensor) -> list[Mesa]:
    """What every Mesa layer solves while the model reads ``input_ids [b t]`` from an empty memory:
    for `solver_statistics` and `condition_numbers`, by token, head and layer (MesaNet Fig. 7 and
    13).
    """
    records: list[Mesa] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, MesaLayer)
        found, _ = layer.project(inputs[0], TokenContext.start(inputs[0]))
        solved = found.without_signs() if isinstance(found, Signed) else found
        assert isinstance(solved, Mesa)
        records.append(solved)

    with ExitStack() as hooks:
        for layer in mesa_layers(model):
            hooks.callback(layer.register_forward_pre_hook(record).remove)
        model(input_ids, use_cache=False)
    return records
