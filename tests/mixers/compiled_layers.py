"""torch.compile gives what eager evaluation gives; `test_compile` runs this file, away from the
type checker.
"""

from __future__ import annotations

import pytest
import torch
from test_mixers import LAYERS, Layer, inputs, tensors
from torch import Tensor
from torch.torch_version import TorchVersion

from families import padded, positions, student
from fastweights.generate import stream
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from tolerances import assert_close

pytestmark = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.11"),
    reason="torch 2.8's compiler fails on slices and properties of named tuples",
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()


ONE_OF_EACH = {layer.name: layer for layer in reversed(LAYERS)}.values()
"""Tracing takes a second or two per layer, whatever its options."""


@pytest.mark.parametrize("layer", ONE_OF_EACH, ids=str)
def test_compiled_layers_agree(layer: Layer) -> None:
    check(layer, torch.float64, "eager")


@pytest.mark.parametrize("name", ["metala", "mamba", "gated_deltanet", "lolcats"])
def test_compiled_kernels_agree(name: str) -> None:
    """In float32, where the compiled extension is an operator of the graph, which functions must
    not alter.
    """
    check(_layer(name), torch.float32, "aot_eager")


@pytest.mark.parametrize("name", ["metala", "deltanet", "mesa", "gated_deltaproduct"])
def test_compiled_blocks_agree(name: str) -> None:
    """Of several chunks."""
    check(_layer(name), torch.float64, "eager", tokens=150)


def _layer(name: str) -> Layer:
    return next(layer for layer in LAYERS if layer.name == name)


def check(layer: Layer, dtype: torch.dtype, backend: str, tokens: int = 9) -> None:
    mixer, x = layer.build(dtype), inputs(1, tokens, dtype=dtype)
    compiled = torch.compile(mixer, backend=backend, fullgraph=True)
    want, state = mixer(x)
    y, final = compiled(x)
    assert_close(y, want, "y")
    for a, b in zip(tensors(final), tensors(state), strict=True):
        assert_close(a, b, "state", dtype)
    state = state.map(Tensor.detach)
    assert_close(compiled(x[:, :1], state)[0], mixer(x[:, :1], state)[0], "next y")
    parameters = [p for p in mixer.parameters() if p.requires_grad]
    want_gradients = torch.autograd.grad(want.square().sum(), parameters)
    for a, b in zip(torch.autograd.grad(y.square().sum(), parameters), want_gradients, strict=True):
        assert_close(a, b, "gradient")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_linearized_models_agree(family: str) -> None:
    model, inputs = student(family), padded()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, want = (
            m(**inputs, position_ids=positions(inputs["attention_mask"])).logits
            for m in (compiled, model)
        )
    there = inputs["attention_mask"].bool()
    assert_close(got[there], want[there], "logits")


@pytest.mark.parametrize("name", ["metala", "gated_deltanet", "mamba"])
def test_compiled_models_decode_the_same(name: str) -> None:
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, mixers=[{"name": name}]
    )
    model, prompt = FastWeightsForCausalLM(config).double().eval(), torch.randint(32, (2, 5))
    want = list(stream(model, prompt, max_new_tokens=6, temperature=0))
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(
        torch.stack(list(stream(model, prompt, max_new_tokens=6, temperature=0))), torch.stack(want)
    )
