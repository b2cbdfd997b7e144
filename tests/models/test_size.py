"""The size of models that are not built."""

from __future__ import annotations

import pytest

from fastweights import FastWeightsConfig
from fastweights.models import size
from fastweights.models.size import count_parameters, require_memory
from tiny import tiny, tiny_config


@pytest.mark.parametrize("layers", ["metala", "softmax", "hybrid", "mamba"])
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "learnt_positions": 9}])
def test_parameters_are_those_of_the_model(layers, fields):
    for depth in (3, 4, 5):
        model = tiny(layers, num_hidden_layers=depth, **fields)
        assert count_parameters(model.config) == sum(p.numel() for p in model.parameters())
        assert model.config.num_hidden_layers == depth


def test_a_model_that_fits_is_let_through(monkeypatch):
    config = tiny_config()
    needed = count_parameters(config) * 4 + size.LAYER_BYTES * config.num_hidden_layers
    monkeypatch.setattr(size, "machine_memory", lambda: needed)
    require_memory(config, 4)
    with pytest.raises(ValueError, match=r"parameters takes .* at least to hold, and this machine"):
        require_memory(config, 4, others=1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1,000,000,000, .* parameters takes"),
        ({"hidden_size": 10**8}, "parameters takes .* PB at least"),
        ({"vocab_size": 10**12}, "parameters takes .* PB at least"),
        ({"hidden_size": 10**9}, "larger than any can be"),
        ({"hidden_size": 4 * 10**9}, "mixers.0. = .* Storage size calculation overflowed"),
    ],
)
def test_absurd_sizes_are_refused_at_once(monkeypatch, sizes, words):
    monkeypatch.setattr(size, "machine_memory", lambda: 10**12)
    with pytest.raises(ValueError, match=words):
        require_memory(FastWeightsConfig(**{"mlp": "gated", **sizes}), 2)
