"""Blocks that layers share: counted, saved and loaded once, and found by whatever walks layers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights import FastWeightsForCausalLM
from fastweights.analysis.capture import capture_projections
from fastweights.analysis.cost import cost
from fastweights.budget import CPU, StepShape, count_by_part, count_operations, trace
from fastweights.engines.titan.operations import training_operations
from fastweights.layers import LayerStream
from fastweights.models.graph import refuse_static
from fastweights.models.size import count_parameters
from model_laws import assert_checkpointed_gradients
from tiny import tiny, tiny_config, tokens

BLOCKS: list[dict[str, Any]] = [
    {"layers": [0, 3], "width": 20, "rank": 3, "attention_rank": 2},
    {"layers": [2], "width": 12, "heads": 2},
]
FIELDS: dict[str, Any] = {"num_hidden_layers": 4, "mlp": None, "shared_blocks": BLOCKS}


def drawn() -> FastWeightsForCausalLM:
    return tiny("linear", **FIELDS)


def test_their_weights_are_there_once(tmp_path: Path) -> None:
    model, config = drawn(), tiny_config("linear", **FIELDS)
    numbers = sum(p.numel() for p in model.parameters())
    assert numbers == sum(t.numel() for t in model.state_dict().values())
    assert numbers == count_parameters(config) == count_by_part(config).total
    assert sum("W_q" in name for name in model.state_dict() if ".shared." in name) == 2
    model.save_pretrained(tmp_path)
    loaded = FastWeightsForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = tokens(2, 5)
    for same in (loaded, deepcopy(model)):
        assert torch.equal(same(ids).logits, model(ids).logits)
        blocks, layers = same.model.shared, same.model.layers
        assert [layers[i].shared.block for i in (0, 2, 3)] == [blocks[0], blocks[1], blocks[0]]
        assert layers[1].shared is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_of_all_uses_add_up_through_checkpointed_layers(reentrant: bool) -> None:
    assert_checkpointed_gradients(drawn(), reentrant=reentrant)


def test_every_use_is_a_mixer_of_its_layer() -> None:
    model = drawn()
    with capture_projections(model) as found:
        model(tokens(1, 4))
    uses = [path for path in found if path.endswith(".shared")]
    assert uses == [f"model.layers.{layer}.shared" for layer in (0, 2, 3)]
    assert refuse_static(model, model(tokens(1, 4), use_cache=True).past_key_values) == (
        "model.layers.0.shared is softmax attention to all tokens"
    )


def test_every_use_takes_operations() -> None:
    plain = tiny_config("linear", **{**FIELDS, "shared_blocks": None})
    config, length = tiny_config("linear", **FIELDS), 32
    uses = [cost(use, length) for block in drawn().model.layers if (use := block.shared)]
    more = training_operations(config, length) - training_operations(plain, length)
    assert more == sum(use.train for use in uses)
    rules = count_operations(config, length).recurrences
    assert rules.keys() == {"Decay", "Softmax"}


def test_every_use_takes_memory() -> None:
    shared = [{"layers": [1], "width": 12}]
    config = tiny_config("linear", mlp=None, shared_blocks=shared)
    alone, sharing = trace(config, StepShape(1, 8), CPU).of_layers
    assert alone.kept < sharing.kept
    assert alone.gradients < sharing.gradients


def test_generation_goes_on_from_the_keys_of_every_use() -> None:
    model, ids = drawn(), tokens(2, 5)
    said = [
        model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*said)


def test_embeddings_that_nobody_gives_are_missed() -> None:
    use = drawn().model.layers[0].shared
    x = torch.zeros(1, 2, 16, dtype=torch.float64)
    with pytest.raises(LookupError, match=r"there are none; .*=LayerStream\(embeddings=…\)"):
        use(x)
    assert use(x, stream=LayerStream(embeddings=x))[0].shape == x.shape


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([{"width": 9, "layers": []}], r'its "layers" are numbers from 0 to 1, at least one'),
        ([{"width": 9, "layers": [2]}], r'its "layers" are numbers from 0 to 1'),
        ([{"width": 9, "layers": [0]}, {"width": 9, "layers": [1, 0]}], "uses a layer twice"),
        ([{"layers": [0]}], r"at hidden_size = 16: .*'width'"),
        ([{"layers": [0], "width": 9, "heads": 5}], "not divisible by heads = 5"),
        ([{"layers": [0], "width": 9, "kv_heads": 3}], "not a multiple of kv_heads = 3"),
    ],
)
def test_blocks_that_cannot_be_are_refused(blocks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(shared_blocks=blocks)


def test_models_that_read_both_ways_have_none() -> None:
    with pytest.raises(ValueError, match="shared_blocks read from left to right"):
        tiny_config(bidirectional=True, shared_blocks=BLOCKS[1:], num_hidden_layers=4)
