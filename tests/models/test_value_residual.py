"""What one layer leaves for the next: RWKV-7's values, from token to token and layer to layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights import FastWeightsForCausalLM
from fastweights.analysis.conditions import conditions
from fastweights.budget import CPU, StepShape, trace
from fastweights.layers import LayerStream
from fastweights.mixers import make
from model_laws import assert_checkpointed_gradients, assert_read_in_any_cut, moved
from oracles import rwkv7
from tiny import tiny_config, tokens
from tolerances import array, assert_close

RANKS = {"decay_rank": 3, "rate_rank": 4, "gate_rank": 5, "value_rank": 2}
MIXERS = [
    {"name": "rwkv7", **RANKS},
    {"name": "rwkv7_channel", "width": 24},
    {"name": "rwkv7", "residual": True, **RANKS},
]


def drawn(**fields: object) -> FastWeightsForCausalLM:
    """A model none of whose parameters is at its start."""
    torch.manual_seed(0)
    config = tiny_config(mixers=MIXERS, num_hidden_layers=3, mlp=None, **fields)
    return moved(FastWeightsForCausalLM(config).double())


def test_a_layer_mixes_its_values_with_those_that_it_is_given() -> None:
    torch.manual_seed(0)
    mixer = make("rwkv7", 16, residual=True, **RANKS).double()
    x, first = torch.randn(2, 7, 16).double(), torch.randn(2, 7, 16).double()
    parameters = {name: array(p) for name, p in mixer.state_dict().items()}
    want = rwkv7.rwkv7(array(x), parameters, first=array(first))
    stream = LayerStream(first)
    assert_close(mixer(x, stream=stream)[0], want, "y")
    assert stream.values is first


def test_the_values_are_those_of_the_layer_that_left_them() -> None:
    model, ids = drawn(), tokens(2, 6)
    seen: list[Tensor | None] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, args, output: seen.append(output[2]))
    model(ids)
    x = model.model.embed_tokens(ids) * model.config.input_scale
    mixer, norm = model.model.layers[0].mixer, model.model.layers[0].mixer_norm
    shifted = rwkv7.shifted(array(norm(x)), array(mixer.shift.mu[3]))
    for values in seen:
        assert values is not None
        assert_close(values, shifted @ array(mixer.W_v.weight).T, "values")


def test_cut_padded_and_packed_sequences() -> None:
    assert_read_in_any_cut(drawn())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_pass_through_the_values_of_checkpointed_layers(reentrant: bool) -> None:
    assert_checkpointed_gradients(drawn(), reentrant=reentrant)


def test_values_that_no_layer_has_left_are_missed() -> None:
    mixer = make("rwkv7", 16, residual=True)
    with pytest.raises(LookupError, match="none has left any; run it in a model"):
        mixer(torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match=r"mixers\[0\] = .* put one with residual=False before it"):
        tiny_config(mixers=MIXERS[2:])
    with pytest.raises(ValueError, match=r"mixers\[0\] = .* none leaves any"):
        tiny_config(mixers=[*MIXERS[2:], *MIXERS[:1]])


def test_what_is_computed_of_a_layer_alone_has_stand_ins() -> None:
    alone, mixing = (make("rwkv7", 16, residual=residual, **RANKS) for residual in (False, True))
    assert conditions(mixing) == conditions(alone)
    plain = tiny_config(mixers=MIXERS[:2], num_hidden_layers=4, mlp=None)
    residual = tiny_config(mixers=[*MIXERS, MIXERS[1]], num_hidden_layers=4, mlp=None)
    peaks = [trace(c, StepShape(1, 8), CPU).peak(gradients_exist=False) for c in (plain, residual)]
    assert peaks[0] < peaks[1] < 1.2 * peaks[0]
