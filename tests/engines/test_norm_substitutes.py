"""The norms of transformers' linear models beside those that take their place."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from fastweights.engines.transformers.norms import NORMS
from fastweights.engines.transformers.substitute import Substitute, Switch

FAMILIES = (
    "bamba",
    "falcon_mamba",
    "kimi_linear",
    "mamba2",
    "olmo_hybrid",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
)
WIDTH = 24


def _pairs() -> list[Any]:
    """(class, method's name, substitute) of every norm of those families that are there."""
    found = []
    for family in filter(CONFIG_MAPPING.__contains__, FAMILIES):
        module = vars(import_module(f"transformers.models.{family}.modeling_{family}"))
        for norm in NORMS:
            name, method = norm.name.split(".")
            if name in module:
                found.append(pytest.param(module[name], method, norm, id=f"{family}-{name}"))
    return found


def _build(kind: type[nn.Module]) -> nn.Module:
    groups = (WIDTH // 2,) if "group_size" in kind.__init__.__code__.co_varnames else ()
    module = kind(WIDTH, *groups)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _streams(kind: type[nn.Module], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    count = 2 if "Gated" in kind.__name__ else 1
    return [torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(("kind", "method", "norm"), _pairs())
def test_values_and_gradients_are_theirs(
    kind: type[nn.Module], method: str, norm: Substitute
) -> None:
    theirs, module, streams = vars(kind)[method], _build(kind), _streams(kind, torch.float32)
    y, expected = norm.compute(module, *streams), theirs(module, *streams)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    leaves = [*streams, *(module.parameters() if method == "forward" else ())]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    for found, wanted in zip(
        torch.autograd.grad(y.sin().sum(), leaves),
        torch.autograd.grad(expected.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "method", "norm"), _pairs())
def test_other_dtypes_are_left_to_theirs(
    kind: type[nn.Module], method: str, norm: Substitute
) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        streams = _streams(kind, dtype)
        assert norm.compute(_build(kind).to(dtype), *streams) is NotImplemented
        ours = norm.put_before(vars(kind)[method], Switch())
        torch.manual_seed(1)
        module = _build(kind).to(dtype)
        assert torch.equal(ours(module, *streams), vars(kind)[method](module, *streams))


def test_a_gated_norm_without_groups_is_known() -> None:
    """As transformers 5.16 and 5.17 have them."""

    def norm(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = hidden_states if gate is None else hidden_states * nn.functional.silu(gate)
        size = x.square().mean(-1, keepdim=True) + self.variance_epsilon
        return self.weight * x * size.rsqrt()

    (ours,) = (norm for norm in NORMS if norm.name == "BambaRMSNormGated.forward")
    assert ours.disagreement(norm) is None
    module, x = SimpleNamespace(weight=torch.rand(12), variance_epsilon=1e-6), torch.randn(3, 12)
    torch.testing.assert_close(ours.compute(module, x, x), norm(module, x, x))
