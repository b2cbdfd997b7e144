"""Rotary positions in one pass, and in place of transformers' own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from extension import compiled, every_lesser_isa
from fastweights import kernels
from fastweights.engines.transformers.passes import merge_passes
from fastweights.engines.transformers.substitute import MARK
from fastweights.kernels.native import library
from fastweights.ops import Rotation, rotate
from tolerances import SAME, error


def drawn(b: int, t: int, h: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(b, h, t, width, generator=generator).transpose(1, 2)
    cosines, sines = torch.randn(2, 1, t, 1, width, generator=generator)
    return x, cosines, sines


def defined(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Pair by pair, in float64."""
    x, c, s = (y.double().expand(x.shape) for y in (x, cosines, sines))
    y, half = torch.empty_like(x), x.shape[-1] // 2
    for i in range(half):
        y[..., i] = x[..., i] * c[..., i] - x[..., i + half] * s[..., i]
        y[..., i + half] = x[..., i + half] * c[..., i + half] + x[..., i] * s[..., i + half]
    return y


SHAPES = [(1, 1, 1, 2), (2, 37, 3, 6), (3, 16, 2, 40), (1, 65, 6, 64)]


@compiled
def test_heads_are_turned_by_c() -> None:
    for shape in SHAPES:
        given = drawn(*shape)
        assert kernels.select(Rotation(*given)).name == "rotary positions (compiled)"
        for streams in (given, [s.contiguous() for s in given]):
            assert error(rotate(*streams), defined(*streams)) <= SAME


@compiled
@every_lesser_isa
def test_lesser_instruction_sets(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, given: call(f"{name}_{isa}", given))
    for shape in SHAPES:
        assert error(rotate(*drawn(*shape)), defined(*drawn(*shape))) <= SAME


def test_other_rotations_are_those_of_torch() -> None:
    x, cosines, sines = drawn(2, 9, 3, 8)
    leaf = x.clone().requires_grad_()
    torch.autograd.gradcheck(rotate, (leaf.double(), cosines.double(), sines.double()))
    spread = torch.stack([x, x], -1)[..., 0]
    for given in ((leaf, cosines, sines), (spread, cosines, sines), (x.bfloat16(), cosines, sines)):
        assert "(torch)" in kernels.select(Rotation(*given)).name
        assert error(rotate(*given), defined(*given)) <= (SAME if given[0].is_leaf else 1e-2)


@compiled
def test_a_model_takes_one_pass_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 24,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ids = torch.randint(11, (2, 9))
    file = sys.modules[type(model).__module__]
    norm, mlp = (vars(file)[f"Llama{kind}"] for kind in ("RMSNorm", "MLP"))
    monkeypatch.setattr(file, "apply_rotary_pos_emb", vars(file)["apply_rotary_pos_emb"])
    for one in (norm, mlp):
        monkeypatch.setattr(one, "forward", one.forward)
    expected = model(ids).logits
    classes = "llama.LlamaMLP.forward", "llama.LlamaRMSNorm.forward"
    named = *classes, "llama.apply_rotary_pos_emb"
    assert merge_passes(model) == named
    assert merge_passes(model) == ()
    assert hasattr(norm.forward, MARK)
    assert hasattr(mlp.forward, MARK)
    called: list[str] = []
    gradients: list[Any] = []
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, p: called.append(name) or call(name, p))
    with torch.no_grad():
        assert error(model(ids).logits, expected) <= SAME
    assert called.count("fw_rotate") == 4
    assert called.count("fw_norm") == 5
    for logits in (expected, model(ids).logits):
        logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    for theirs, ours in zip(*gradients, strict=True):
        assert theirs is not None
        assert error(ours, theirs) <= SAME
