"""What training minimises: cross-entropy and a z-loss, of every kind of model that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.train import AdamW, Architecture, Bytes, LoRA, train
from fastweights.training.language.adapters import add_adapters
from fastweights.training.language.objective import make_objective
from killable_runs import curve, tiny

WEIGHT = 0.01
LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 258,
    "intermediate_size": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def ours() -> Any:
    return Architecture(({"name": "metala", "heads": 2},), 1, 16).build(Bytes().build([]))


def softmax() -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))


def linearized() -> Any:
    return linearize(softmax(), LinearAttentionConfig(window=3))


def adapted(model: Any) -> Any:
    pytest.importorskip("peft")
    return add_adapters(model, LoRA(2))


@pytest.mark.parametrize(
    "make",
    [ours, softmax, linearized, lambda: adapted(ours()), lambda: adapted(softmax())],
    ids=["ours", "transformers", "linearized", "ours with LoRA", "transformers with LoRA"],
)
def test_the_z_loss_is_that_of_the_logits(make) -> None:
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(258, (2, 9))
    labels = ids.masked_fill(ids < 60, -100)
    losses = make_objective(model, WEIGHT)(model.train(), {"input_ids": ids, "labels": labels})
    plain = make_objective(model, 0.0)(model, {"input_ids": ids, "labels": labels})
    log_z = model.eval()(input_ids=ids).logits[:, :-1].double().logsumexp(-1)
    expected = WEIGHT * log_z[labels[:, 1:] != -100].square().mean()
    assert plain.keys() == {"loss"}
    assert torch.equal(losses["loss"], plain["loss"])
    assert losses["z_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses["z_loss"].requires_grad


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objective")


def test_the_curve_has_the_z_loss_apart(folder) -> None:
    """A heavy one draws Z towards 1; `loss` stays the cross-entropy."""
    curves = {}
    for weight in (0.0, 1e-9, 1.0):
        config = tiny(folder, z_loss=weight, optimizer=AdamW(lr=0.1), accumulate=2)
        train(config, folder / f"{weight}", cpu=True)
        curves[weight] = curve(folder / f"{weight}")
    plain, light, heavy = curves.values()
    assert "z_loss" not in plain[0]
    assert [row["loss"] for row in light] == pytest.approx([row["loss"] for row in plain], rel=1e-4)
    assert heavy[0]["loss"] == plain[0]["loss"]
    assert heavy[0]["z_loss"] == pytest.approx(1e9 * light[0]["z_loss"], rel=1e-5)
    assert heavy[-1]["z_loss"] < 0.8 * 1e9 * light[-1]["z_loss"]
