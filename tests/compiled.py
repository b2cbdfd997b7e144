"""torch.compile gives what eager evaluation gives; `test_compile` runs this file, away from the type checker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from test_mixers import LAYERS, Layer, inputs, tensors
from tolerances import assert_close


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_compiled_layers_agree(layer: Layer) -> None:
    mixer, x = layer.build(), inputs(1, 9)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    want, state = mixer(x)
    y, final = compiled(x)
    assert_close(y, want, "y")
    for a, b in zip(tensors(final), tensors(state), strict=True):
        assert_close(a, b, "state", torch.float64)
    state = state.map(Tensor.detach)
    assert_close(compiled(x[:, :1], state)[0], mixer(x[:, :1], state)[0], "next y")
    parameters = [p for p in mixer.parameters() if p.requires_grad]
    want_gradients = torch.autograd.grad(want.square().sum(), parameters)
    for a, b in zip(torch.autograd.grad(y.square().sum(), parameters), want_gradients, strict=True):
        assert_close(a, b, "gradient")
