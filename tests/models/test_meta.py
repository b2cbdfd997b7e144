"""Models on the meta device, where a tensor elsewhere and a look at a number are errors: what runs
there runs on an accelerator without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_classify import CLASSIFIERS
from torch import Tensor
from transformers import DynamicCache

from families import student
from fastweights import (
    MIXERS,
    FastWeightsCache,
    FastWeightsForCausalLM,
    FastWeightsForSequenceClassification,
    FastWeightsForSequencePairClassification,
    FastWeightsForTokenClassification,
)
from fastweights.kernels.triton import launch
from fastweights.linearize import LinearAttentionConfig
from fastweights.train import Architecture, TrainConfig
from fastweights.training.data.corpus import Text
from fastweights.training.language import language_model as training
from fastweights.training.language.language_model import LanguageModelStage
from fastweights.training.loop.loop import Loop
from fastweights.training.loop.processes import Alone
from kinds import form_of, one_of_each
from tiny import LAYERS, tiny, tiny_config

pytestmark = pytest.mark.sampled

META = torch.device("meta")
LENGTH = 70
ADAMW = torch.optim.AdamW


@pytest.fixture(
    params=["kernels of the GPU", pytest.param("torch alone", marks=pytest.mark.slow)], autouse=True
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without Triton: either may run on an accelerator."""
    if request.param == "torch alone":
        monkeypatch.setattr(launch, "is_installed", lambda: False)


NAMES = [*MIXERS, "hybrid"]
each_kind = pytest.mark.parametrize("name", one_of_each(NAMES))
each_form = pytest.mark.parametrize("name", one_of_each(NAMES, form_of))


def ids(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long, device=META)


def placed(name: str, dtype: torch.dtype = torch.float32) -> FastWeightsForCausalLM:
    """A model whose tensors are made on the device, none of them elsewhere."""
    with META:
        model = FastWeightsForCausalLM(tiny_config(name)).to(dtype)
    strays = [n for n, x in [*model.named_parameters(), *model.named_buffers()] if not x.is_meta]
    assert not strays
    return model


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@each_kind
def test_training(name: str, dtype: torch.dtype) -> None:
    model, x = placed(name, dtype).train(), ids(2, LENGTH)
    model(x, labels=x).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@each_form
def test_training_on_padded_and_packed_text(name: str) -> None:
    model, x = placed(name).train(), ids(2, 12)
    model(x, labels=x, attention_mask=torch.ones_like(x)).loss.backward()
    model(x, labels=x, position_ids=torch.zeros_like(x)).loss.backward()


@each_form
def test_decoding(name: str) -> None:
    model, x, cache = placed(name).eval(), ids(2, 20), FastWeightsCache()
    with torch.inference_mode():
        model(x, past_key_values=cache, use_cache=True)
        for _ in range(3):
            output = model(x[:, :1], past_key_values=cache, use_cache=True)
        model(
            x[:, :5], past_key_values=cache, use_cache=True, position_ids=torch.zeros_like(x[:, :5])
        )
    assert output.logits.is_meta
    assert all(state.position.is_meta for state in cache.states)


TEXT = {
    "sequence": FastWeightsForSequenceClassification,
    "pair": FastWeightsForSequencePairClassification,
    "token": FastWeightsForTokenClassification,
}


@pytest.mark.parametrize(
    ("kind", "bidirectional"), [("sequence", True), ("pair", False), ("token", True)]
)
def test_classifiers_of_text(kind: str, bidirectional: bool) -> None:
    shape = (2, 2, 20) if kind == "pair" else (2, 20)
    with META:
        model = TEXT[kind](tiny_config("hybrid", num_labels=3, bidirectional=bidirectional))
    labels = ids(2, 20) if kind == "token" else ids(2)
    model(ids(*shape), labels=labels).loss.backward()
    model(ids(*shape), attention_mask=ids(*shape), labels=labels).loss.backward()


@pytest.mark.parametrize("kind", ["image", "class token"])
def test_classifiers_of_images(kind: str) -> None:
    build: Callable[..., Any] = CLASSIFIERS[kind][0]
    model = build().to(META)
    model(torch.empty(2, 2, 8, 8, device=META), labels=ids(2)).loss.backward()


RULES = {
    "window": LinearAttentionConfig(window=4),
    "window, two normalisers": LinearAttentionConfig(window=4, shared=False),
    "no window": LinearAttentionConfig(window=0),
}


@pytest.mark.parametrize(
    ("family", "rule"),
    [*(("llama", rule) for rule in RULES), ("gemma2", "window"), ("qwen3", "no window")],
)
def test_linearized_models(family: str, rule: str) -> None:
    model, x = student(family, RULES[rule]).to(META), ids(2, 20)
    model.train()(x, labels=x).loss.backward()
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model.eval()(x, past_key_values=cache, use_cache=True)
        for _ in range(6):
            output = model(x[:, :1], past_key_values=cache, use_cache=True)
    assert output.logits.is_meta


def test_a_look_at_a_number_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        bool(tiny().to(META)(ids(1, 4)).logits.any())


@each_form
def test_an_update_of_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, clipping and the optimiser; only what is logged is looked at."""
    # the meta device has no autocast, and no fused AdamW
    monkeypatch.setattr(training, "go_backward", Tensor.backward)
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, fused, **o: ADAMW(*a, **o))
    (tmp_path / "text.txt").write_text("a sheep and a goat\n" * 200)
    model = Architecture(tuple(LAYERS[name]), width=16, layers=len(LAYERS[name]))
    text = Text((str(tmp_path / "text.txt"),))
    config = TrainConfig(text=text, model=model, length=32, steps=2, batch=2)
    stage = LanguageModelStage(config, tmp_path / "run")
    stage.prepare(tmp_path)
    stage.model.to(META)
    loop = Loop(stage, config, Alone())
    loop.update()
    assert loop.step == 1
    assert loop.losses["loss"].is_meta
