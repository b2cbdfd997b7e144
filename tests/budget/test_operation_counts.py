"""Parameters and operations by part, beside torch's own counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.budget import count_by_part, count_operations, decoding, find_accelerator
from fastweights.engines.titan.operations import training_operations
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, preset
from fastweights.models.size import count_parameters

MIXERS = ("metala", "gated_deltanet", "mesa", "mamba2", "softmax", "gla", "retnet")
EXPERTS = {"name": "experts", "width": 48, "routing": {"count": 6, "chosen": 2}, "shared": 32}
H100 = find_accelerator("h100")


def config_of(*mixers: str, **fields: object) -> FastWeightsConfig:
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, **fields}
    return FastWeightsConfig(mixers=[{"name": name} for name in mixers], **sizes)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"mlp": None},
        {"learnt_positions": 32},
        {"mlps": [EXPERTS, None], "num_hidden_layers": 5},
    ],
)
def test_parts_are_the_whole(fields: dict) -> None:
    config = config_of("metala", "softmax", **fields)
    assert count_by_part(config).total == count_parameters(config)


@pytest.mark.parametrize("mixer", MIXERS)
def test_products_are_those_that_torch_counts(mixer: str) -> None:
    """The compiled kernels and fused attention are not counted by torch."""
    config, tokens = config_of(mixer), 128
    ids = torch.zeros(1, tokens + 1, dtype=torch.long)
    model = FastWeightsForCausalLM(config).train()
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids).loss
    found = count_operations(config, tokens)
    forward = found.projections * (tokens + 1) + found.head * tokens
    assert counter.get_total_flops() == pytest.approx(forward, rel=1e-6)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == pytest.approx(2 * forward, rel=0.02)


def test_a_token_passes_the_experts_that_it_chooses() -> None:
    config = config_of("softmax", mlps=[EXPERTS])
    without = count_operations(config_of("softmax", mlp=None), 128).projections
    mlps = count_operations(config, 128).projections - without
    assert mlps == 3 * 2 * 64 * (3 * (2 * 48 + 32) + 6)
    idle = 3 * 4 * 3 * 48 * 64
    dense = config_of("softmax", mlps=[{**EXPERTS, "routing": {"count": 6, "chosen": 6}}])
    assert training_operations(dense, 128) - training_operations(config, 128) == 6 * idle


def test_a_decay_takes_what_its_equation_says() -> None:
    """Per head 2 k v to read, 2 k v to write, k v to decay."""
    config = FastWeightsConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=3, mixers=[{"name": "metala", "heads": 2}]
    )
    keys, values = 16, 32
    assert count_operations(config, 2048).recurrences == {"Decay": 3 * 2 * 5 * keys * values}


def test_softmax_takes_more_of_longer_sequences_and_a_recurrence_does_not() -> None:
    softmax, metala = (
        [count_operations(config_of(name), length).recurrent for length in (512, 1024)]
        for name in ("softmax", "metala")
    )
    assert softmax[1] == 2 * softmax[0]
    assert metala[1] == metala[0]


def test_decoding_reads_weights_once_and_states_twice() -> None:
    config = preset("metala-1.4b")
    short, long = (decoding(config, context, H100) for context in (2048, 65_536))
    assert short == long.__class__(**{**vars(long), "context": 2048})
    moved = short.weights + 2 * short.state
    assert short.floor(1) == pytest.approx(moved / 3.35e12)
    state = 24 * 4 * (1024 * 128 + 3 * 2048)  # per layer S, and three inputs of the convolution
    assert short.state == state


def test_a_cache_grows_with_its_context() -> None:
    config = config_of("softmax")
    one, two = (decoding(config, context, H100).state for context in (100, 200))
    assert two == 2 * one == 2 * 100 * 3 * 2 * 64 * 2
