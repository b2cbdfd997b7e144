"""The memory of a step that is found without numbers, beside what the same step takes with them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fastweights import kernels
from fastweights.budget import ACCELERATORS, CPU, StepShape, UntraceableError, trace
from fastweights.budget.ledger import MemoryLedger
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.loop.stage import go_backward

pytestmark = pytest.mark.sampled

MODELS = {
    name: [{"name": name}]
    for name in ("metala", "gated_deltanet", "mesa", "mamba2", "softmax", "mamba", "swa", "rglru")
} | {"hybrid": [{"name": "metala"}, {"name": "softmax"}]}
WAYS = {"float32": {}, "bf16": {"bf16": True}, "recompute": {"recompute": True}}


def config_of(mixers: list[dict], **fields: object) -> FastWeightsConfig:
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, **fields}
    return FastWeightsConfig(mixers=mixers, **sizes)


def peak_of_a_step(config: FastWeightsConfig, shape: StepShape) -> int:
    """Forward and backward of the whole model, with numbers."""
    model = FastWeightsForCausalLM(config).train()
    if shape.recompute:
        model.gradient_checkpointing_enable()
    ids = torch.randint(config.vocab_size, (shape.sequences, shape.length))
    bf16 = torch.autocast("cpu", torch.bfloat16) if shape.bf16 else nullcontext()
    with kernels.pooling(False), MemoryLedger() as ledger, bf16:
        ledger.know(ids, *model.parameters())
        go_backward(model(input_ids=ids, labels=ids).loss)
    return ledger.peak


@pytest.mark.parametrize(
    ("model", "way"),
    [*((model, "float32") for model in MODELS), ("hybrid", "bf16"), ("metala", "recompute")],
)
def test_a_step_without_numbers_takes_what_it_takes_with_them(model: str, way: str) -> None:
    config, shape = config_of(MODELS[model]), StepShape(2, 256, **WAYS[way])
    found = trace(config, shape, CPU).peak(gradients_exist=False)
    assert found == pytest.approx(peak_of_a_step(config, shape), rel=0.08)


@pytest.mark.parametrize("mixer", ["metala", "gla", "softmax", "mamba"])
def test_what_is_kept_is_what_autograd_saves(mixer: str) -> None:
    """Every storage once, but for parameters and tokens."""
    config, shape = config_of([{"name": mixer}]), StepShape(2, 256)
    model = FastWeightsForCausalLM(config).train()
    ids = torch.randint(config.vocab_size, (shape.sequences, shape.length))
    known = {tensor.data_ptr() for tensor in (ids, *model.parameters())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage)
        return tensor

    with kernels.pooling(False), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    total = sum(storage.nbytes() for at, storage in saved.items() if at not in known)
    assert loss is not None
    assert trace(config, shape, CPU).kept == pytest.approx(total, rel=1e-3)


def test_embeddings_that_are_the_head_have_their_gradient_once() -> None:
    config = config_of(MODELS["metala"], vocab_size=20_000, tie_word_embeddings=True)
    shape = StepShape(1, 64)
    found = trace(config, shape, CPU).peak(gradients_exist=False)
    assert found == pytest.approx(peak_of_a_step(config, shape), rel=0.08)


@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_keeps_what_its_kernels_keep(model: str) -> None:
    """Without a GPU: its kernels save streams and some states, a multiple of the layer's input."""
    config = config_of(MODELS[model])
    one, two = (
        trace(config, StepShape(n, 256, bf16=True), ACCELERATORS["h100"]).kept for n in (1, 2)
    )
    inputs = 4 * 256 * config.hidden_size * config.num_hidden_layers
    assert 8 * inputs < two - one < 100 * inputs


def test_recomputing_keeps_the_inputs_of_blocks_alone() -> None:
    config = config_of(MODELS["metala"])
    found = trace(config, StepShape(2, 256, recompute=True), CPU)
    assert {block.kept for block in found.blocks} == {4 * 2 * 256 * config.hidden_size}


class Curious(MIXERS["metala"]):
    """A mixer that looks at what it reads."""

    def project(self, x, past):
        return super().project(x if x.sum() > 0 else -x, past)


def test_a_mixer_that_looks_at_numbers_is_named(monkeypatch) -> None:
    monkeypatch.setitem(MIXERS, "curious", Curious)
    with pytest.raises(UntraceableError, match="the memory of curious is not known in advance"):
        trace(config_of([{"name": "curious"}]), StepShape(1, 64), CPU)
