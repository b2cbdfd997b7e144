"""Mixtures of experts beside the literal sum over experts, their gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastweights.layers import Experts, Routing
from oracles.experts import mixture
from tolerances import array, assert_close

D, WIDTH = 6, 5
ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"count": 5, "chosen": 2},
    "not normalised": {"count": 4, "chosen": 3, "normalized": False, "scale": 2.5},
    "one of all": {"count": 3, "chosen": 1},
    "all": {"count": 3, "chosen": 3},
    "sigmoid": {"count": 6, "chosen": 2, "sigmoid": True, "corrected": True},
    "groups": {
        "count": 12,
        "chosen": 3,
        "sigmoid": True,
        "corrected": True,
        "groups": 4,
        "chosen_groups": 2,
        "scale": 0.7,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain": {"gated": False, "shared": 7},
    "shared": {"shared": 4, "shared_gate": True},
    "latent": {"latent": 3, "shared": 4},
}


def drawn(**fields: Any) -> Experts:
    generator = torch.Generator().manual_seed(0)
    mlp = Experts(D, WIDTH, nn.Tanh(), bias=False, **fields).double()
    for tensor in mlp.state_dict().values():
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.copy_(drawn * (0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5))
    return mlp


def of_token(x: np.ndarray, layer: Any) -> np.ndarray:
    first, second, *third = (
        array(part.weight) for part in layer.children() if hasattr(part, "in_features")
    )
    hidden = np.tanh(first @ x)
    return third[0] @ (hidden * (second @ x)) if third else second @ hidden


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_sum_over_experts(routing: str, others: str) -> None:
    mlp = drawn(routing=ROUTINGS[routing], **OTHERS[others])
    for x in (tokens(3, 7), tokens(1, 1)):
        assert_close(mlp(x), mixture(array(x), mlp, of_token), routing)


def by_all_experts(mlp: Experts, x: Tensor) -> Tensor:
    """Every expert of every token, with a weight of 0 for those that are not chosen."""
    weights, chosen = mlp.router(x.flatten(0, 1))
    table = weights.new_zeros(len(weights), len(mlp.experts)).scatter(1, chosen, weights)
    outputs = torch.stack([expert(x).flatten(0, 1) for expert in mlp.experts], 1)
    return (table[..., None] * outputs).sum(1).view_as(x)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients(routing: str) -> None:
    mlp, x = drawn(routing=ROUTINGS[routing]), tokens(2, 3).requires_grad_()
    inputs = {"x": x, **dict(mlp.named_parameters())}
    cotangent = tokens(2, 3)
    found, wanted = (
        torch.autograd.grad((y * cotangent).sum(), list(inputs.values()))
        for y in (mlp(x), by_all_experts(mlp, x))
    )
    for name, got, want in zip(inputs, found, wanted, strict=True):
        assert_close(got, array(want), name)


def test_an_expert_that_nobody_chooses_has_a_gradient_of_zeros() -> None:
    mlp = drawn(routing={"count": 8, "chosen": 1})
    mlp(tokens(1, 1)).sum().backward()
    idle = [expert for expert in mlp.experts if not expert.W_1.weight.grad.any()]
    assert len(idle) == 7


def test_without_gradients_experts_without_tokens_do_not_run() -> None:
    mlp, ran = drawn(routing={"count": 8, "chosen": 2}), []
    for number, expert in enumerate(mlp.experts):
        expert.register_forward_hook(lambda *_, number=number: ran.append(number))
    with torch.no_grad():
        mlp(tokens(1, 1))
    assert len(ran) == 2


def test_the_shape_is_known_without_numbers() -> None:
    with torch.device("meta"):
        mlp = Experts(D, WIDTH, nn.Tanh(), bias=False, routing=ROUTINGS["groups"])
        assert mlp(torch.zeros(2, 3, D)).shape == (2, 3, D)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 4, "chosen": 5}, "chosen = 5; a token chooses among 4 experts"),
        ({"count": 5, "chosen": 1, "groups": 2}, "count = 5 is no multiple of groups = 2"),
        ({"count": 4, "chosen": 1, "groups": 4}, "groups = 4 leaves 1 expert to a group"),
        (
            {"count": 4, "chosen": 1, "groups": 2, "chosen_groups": 3},
            "chosen_groups = 3 of groups = 2",
        ),
        (
            {"count": 8, "chosen": 5, "groups": 2, "chosen_groups": 1},
            "chosen = 5; a token chooses among 4",
        ),
    ],
)
def test_routings_that_cannot_be_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**fields)


def test_a_gate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_gate = True, but shared = None"):
        drawn(routing=ROUTINGS["all"], shared_gate=True)
