"""The linear layers of patched models multiply as ours, and those of no other model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from family_readings import difference, draw_text, read
from fastweights import ops
from fastweights.engines.transformers import patch_transformers, products
from fastweights.ops import product
from transformers_families import build_family

FAMILIES = ("bamba", "mamba", "qwen3_next")


@pytest.fixture(autouse=True)
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that ours have multiplied; small ones count, and go to oneDNN if any do."""
    weights: list[Tensor] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weights.append(weight)
        return ops.multiply(x, weight, bias)

    monkeypatch.setattr(products, "multiply", multiply)
    monkeypatch.setattr(products, "WORTH_COVERING", 1)
    monkeypatch.setattr(product, "WORTH_ROUTING", 1)
    return weights


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if type(part) is nn.Linear]


@pytest.mark.parametrize("family", FAMILIES)
def test_readings_are_theirs_and_come_back(family: str, multiplied: list[Tensor]) -> None:
    model = build_family(family)
    before = read(model)
    assert not multiplied
    with patch_transformers(model):
        found = read(model)
    called, layers = {id(w) for w in multiplied}, {id(w.weight) for w in linear_layers(model)}
    assert called <= layers
    assert len(called) > len(layers) / 2, "some mixers read a weight without its layer"
    assert difference(found, before) <= (1e-5, "")
    assert torch.equal(found["tokens"], before["tokens"])
    multiplied.clear()
    after = read(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not multiplied


def test_a_model_is_what_it_was(multiplied: list[Tensor]) -> None:
    model = build_family("lfm2")
    state = {name: dict(vars(part)) for name, part in model.named_modules()}
    with patch_transformers(model) as patch:
        assert "torch.nn.Linear.forward" in patch.replaced
        model(draw_text(1, 5))
        assert multiplied
        assert b"fastweights" not in pickle.dumps(model)
        assert {name: dict(vars(part)) for name, part in model.named_modules()} == state


class Doubled(nn.Linear):
    """A class of somebody else's, as quantised layers are."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_other_models_and_classes_are_left_alone(multiplied: list[Tensor]) -> None:
    model, other = build_family("lfm2"), nn.Linear(8, 8)
    head: Any = model.get_output_embeddings()
    head.__class__ = Doubled
    with patch_transformers():
        model(draw_text(1, 5))
        other(torch.randn(3, 8))
        scripted = torch.jit.script(other)
    assert multiplied
    assert not any(w is head.weight or w is other.weight for w in multiplied)
    assert torch.equal(scripted(torch.ones(1, 8)), other(torch.ones(1, 8)))


def test_float64_is_torchs(multiplied: list[Tensor]) -> None:
    model = build_family("lfm2").double()
    with patch_transformers(model):
        model(draw_text(1, 5))
    assert not multiplied


def test_what_holds_a_forward_has_theirs_after_undo(multiplied: list[Tensor]) -> None:
    model = build_family("lfm2")
    with patch_transformers(model), patch_transformers("mamba"):
        held = linear_layers(model)[0].forward
        model(draw_text(1, 5))
        multiplied.clear()
        held(torch.zeros(1, 32))
        assert multiplied
    multiplied.clear()
    held(torch.zeros(1, 32))
    assert not multiplied


def test_what_one_patch_leaves_another_keeps(multiplied: list[Tensor]) -> None:
    first, models = patch_transformers("lfm2"), [build_family(name) for name in ("lfm2", "mamba")]
    with patch_transformers("mamba") as second:
        assert "torch.nn.Linear.forward" not in second.replaced
        first.undo()
        assert "torch.nn.Linear.forward" in second.replaced
        for model, covered in zip(models, (False, True), strict=True):
            multiplied.clear()
            model(draw_text(1, 5))
            assert bool(multiplied) == covered
