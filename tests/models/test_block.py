"""What stands around the mixers: norms, MLPs, residuals, embeddings. Every option × every
property.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastweights import FastWeightsCache, FastWeightsConfig, FastWeightsForCausalLM
from fastweights.layers import Experts
from model_laws import assert_read_in_any_cut, moved
from oracles.experts import mixture
from oracles.layers import join, split, turned
from oracles.rules import softmax
from tiny import VOCABULARY, tiny, tiny_config, tokens
from tolerances import array, assert_close

pytestmark = pytest.mark.sampled

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "layer norm": {"norm": "layer", "norm_eps": 0.1},
    "simple rms norm": {"norm": "simple_rms", "norm_eps": 0.1},
    "gelu": {"mlp": "plain", "hidden_act": "gelu"},
    "relu²": {"mlp": "plain", "hidden_act": "relu2", "mlp_bias": True, "intermediate_size": 24},
    "geglu": {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True},
    "identity": {"mlp": "identity"},
    "no mlp": {"mlp": None},
    "experts": {
        "mlps": [
            {
                "name": "experts",
                "width": 6,
                "routing": {"count": 5, "chosen": 2},
                "shared": 7,
                "shared_gate": True,
            },
            None,
            {"name": "gated", "width": 9},
        ]
    },
    "side by side": {
        "mixers": [
            {"name": "mamba2", "heads": 2, "beside": [{"name": "softmax", "heads": 2}]},
            {"name": "metala"},
        ]
    },
    "shared": {
        "shared_blocks": [
            {"layers": [0, 2], "width": 20, "heads": 2, "rank": 3, "attention_rank": 2},
            {
                "layers": [1],
                "width": 12,
                "kv_heads": 2,
                "head_width": 6,
                "rope": {"fraction": 0.0},
            },
        ]
    },
    "shared, norms behind": {
        "shared_blocks": [{"layers": [1], "width": 12, "rank": 2}],
        "post_norm": [True],
        "norm": "layer",
    },
    "parallel": {"parallel_residual": True, "norm": "layer", "mlp": "plain"},
    "norms behind": {"post_norm": [True, False], "norm_eps": 0.1},
    "norms on both sides": {"sandwich_norms": True, "norm_eps": 0.1},
    "parallel, norms behind": {"parallel_residual": True, "post_norm": [True]},
    "normalized": {"normalized_residual": True, "norm_eps": 0.1},
    "normalized, no mlp": {"normalized_residual": True, "mlp": None},
    "positions": {"learnt_positions": 9},
    "scale": {"embedding_scale": 0.5, "learnt_positions": 9},
}
every_option = pytest.mark.parametrize("option", OPTIONS)


def drawn(option: str, **fields: Any) -> FastWeightsForCausalLM:
    """A model none of whose parameters is at its start."""
    return moved(tiny("hybrid", **OPTIONS[option], **fields))


# an oracle: the backbone in NumPy, with the mixers' own outputs -----------------------------------


def normalized(x: np.ndarray, norm: Any, config: Any) -> np.ndarray:
    y = x - x.mean(-1, keepdims=True) if config.norm == "layer" else x
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + config.norm_eps)
    y = y if config.norm == "simple_rms" else y * array(norm.weight)
    return y + array(norm.bias) if config.norm == "layer" else y


ACTIVATION = {
    "silu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: z * (1 + math.erf(z / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda z: (
        z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    ),
    "relu2": lambda z: max(z, 0.0) ** 2,
}


def linear(x: np.ndarray, layer: Any) -> np.ndarray:
    y = x @ array(layer.weight).T
    return y if layer.bias is None else y + array(layer.bias)


def mlp(x: np.ndarray, layer: Any, config: Any) -> np.ndarray:
    if isinstance(layer, Experts):
        return mixture(x, layer, lambda token, expert: mlp(token, expert, config))
    if config.mlp == "identity":
        return x
    hidden = np.vectorize(ACTIVATION[config.hidden_act])(linear(x, layer.W_1))
    return (
        linear(hidden, layer.W_2)
        if config.mlp == "plain"
        else linear(hidden * linear(x, layer.W_2), layer.W_3)
    )


def shared(x: np.ndarray, e: np.ndarray, use: Any, config: Any) -> np.ndarray:
    """What a layer's use of a shared block gives: Zamba2's equations, projection by projection."""
    block = use.block

    def projected(z: np.ndarray, layer: Any, name: str) -> np.ndarray:
        y = z @ array(layer.weight).T
        if name in use.adapters:
            down, up = (array(half.weight).T for half in use.adapters[name])
            left = slice(None) if name in "qkv" else HALVES[layer is block.mlp.W_2](up.shape[1])
            y = y + (z @ down @ up)[..., left]
        return y

    u = normalized(np.concatenate([x, e], -1), block.norm, config)
    q, k, v = (projected(u, getattr(block, f"W_{name}"), name) for name in "qkv")
    turning = {"fraction": block.rope.fraction}
    q, k = (
        turned(split(z, heads), **turning) for z, heads in ((q, block.heads), (k, block.kv_heads))
    )
    o, _ = softmax(q, k, split(v, block.kv_heads))
    z = normalized(linear(join(o), block.W_o), block.mlp_norm, config)
    gate, inside = (projected(z, layer, "mlp") for layer in (block.mlp.W_1, block.mlp.W_2))
    hidden = np.vectorize(ACTIVATION[config.hidden_act])(gate) * inside
    return linear(linear(hidden, block.mlp.W_3), use.W_o)


HALVES = (lambda n: slice(n // 2), lambda n: slice(n // 2, n))


def backbone(model: FastWeightsForCausalLM, ids: torch.Tensor) -> np.ndarray:
    config, trunk = model.config, model.model
    x = array(trunk.embed_tokens.weight)[ids.numpy()]
    if config.learnt_positions is not None:
        x = x + array(trunk.embed_positions.weight)[: ids.shape[1]]
    x = x * (4.0 if config.embedding_scale is None else config.embedding_scale)
    embeddings = x
    for i, block in enumerate(trunk.layers):
        behind = config.post_norm[i % len(config.post_norm)]

        def before(z: np.ndarray, norm: Any, apply: bool = not behind) -> np.ndarray:
            return normalized(z, norm, config) if apply else z

        def after(z: np.ndarray, norm: Any, apply: bool = behind) -> np.ndarray:
            return normalized(z, norm, config) if apply else z

        def second(z: np.ndarray, norm: Any) -> np.ndarray:
            return normalized(z, norm, config) if config.sandwich_norms else z

        given = 0 if block.shared is None else shared(x, embeddings, block.shared, config)
        u = before(x + given, block.mixer_norm)
        y = after(array(block.mixer(torch.from_numpy(u))[0]), block.mixer_norm)
        y = second(y, block.mixer_norm_behind)
        mixed = (u if config.normalized_residual else x) + y
        if block.mlp is None:
            x = mixed
            continue
        u = before(x if config.parallel_residual else mixed, block.mlp_norm)
        z = after(mlp(u, block.mlp, config), block.mlp_norm)
        z = second(z, block.mlp_norm_behind)
        x = (u if config.normalized_residual else mixed) + z
    return normalized(x, trunk.norm, config) @ array(model.lm_head.weight).T


@every_option
def test_the_backbone_is_what_its_fields_say(option: str) -> None:
    model, ids = drawn(option), tokens(2, 7)
    assert_close(model(ids).logits, backbone(model, ids), option)


# properties ---------------------------------------------------------------------------------------


@every_option
def test_cut_padded_and_packed_sequences(option: str) -> None:
    assert_read_in_any_cut(drawn(option))


@every_option
def test_a_packed_document_goes_on_after_a_cut(option: str) -> None:
    model, ids, cache = drawn(option), tokens(2, 9), FastWeightsCache()
    model(
        ids[:, :6],
        segments=torch.tensor([[0, 0, 0, 1, 1, 1]] * 2),
        past_key_values=cache,
        use_cache=True,
    )
    rest = model(ids[:, 6:], past_key_values=cache).logits
    assert_close(rest, array(model(ids[:, 3:]).logits[:, 3:]), "the rest of the second document")


@every_option
def test_saving_and_gradients(option: str, tmp_path: Path) -> None:
    model, ids = drawn(option, dtype=torch.float32), tokens(2, 6)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_checkpoint_from_before_the_options_is_the_same_model(tmp_path: Path) -> None:
    model = drawn("default", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    known = {
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "mixers",
        "intermediate_size",
        "norm_eps",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in known}))
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path)(tokens(1, 5)).logits,
        model(tokens(1, 5)).logits,
    )
    assert {
        name.split(".")[-2] for name in load_file(tmp_path / "model.safetensors") if ".mlp." in name
    } == {
        "W_1",
        "W_2",
        "W_3",
    }


def test_dropout_is_of_training_and_keeps_the_mean() -> None:
    model = tiny(embedding_dropout=0.5, hidden_size=64, dtype=torch.float32)
    ids = tokens(1, 8)
    first = model(ids, output_hidden_states=True).hidden_states[0]
    assert torch.equal(first, 8 * model.get_input_embeddings()(ids))
    dropped = model.train()(ids, output_hidden_states=True).hidden_states[0]
    assert torch.equal(dropped[dropped != 0], 2 * first[dropped != 0])
    assert (dropped == 0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    block = tiny(residual_dropout=0.999999, dtype=torch.float32).train().model.layers[0]
    x = torch.randn(1, 4, 16)
    assert torch.equal(block(x, None, None, None)[0], x)


def test_gpt2_starts_its_weights_in_its_own_way() -> None:
    config = tiny_config(
        "softmax",
        hidden_size=64,
        num_hidden_layers=8,
        vocab_size=500,
        initializer_range=0.02,
        mlp="plain",
    )
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(config).model
    block = model.layers[0]
    for weight in (model.embed_tokens.weight, block.mixer.W_q.weight, block.mlp.W_1.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.mixer.W_o.weight, block.mlp.W_2.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "batch"}, "norm = 'batch'; there are layer, rms, simple_rms"),
        ({"mlp": "swiglu"}, "mlp = 'swiglu'; there are gated, identity, plain"),
        ({"hidden_act": "step"}, "hidden_act = 'step'; there are .*gelu"),
        ({"mlp": None, "parallel_residual": True}, "no MLP to be parallel to"),
        ({"post_norm": []}, "post_norm lists 0 layers of 2"),
        ({"post_norm": [True] * 4}, "post_norm lists 4 layers of 2"),
        (
            {"normalized_residual": True, "parallel_residual": True},
            "two ways to add to the stream",
        ),
        (
            {"normalized_residual": True, "post_norm": [True]},
            "normalized_residual adds to what the norms give",
        ),
        (
            {"sandwich_norms": True, "post_norm": [True]},
            "sandwich_norms puts norms on both sides",
        ),
        ({"learnt_positions": 0}, "learnt_positions = 0; it is above 0, or None"),
        ({"embedding_scale": 0.0}, "embedding_scale = 0.0"),
        ({"initializer_range": -0.1}, "initializer_range = -0.1"),
        ({"embedding_dropout": 1.0}, "embedding_dropout = 1.0; it is a probability"),
        ({"residual_dropout": -0.1}, "residual_dropout = -0.1"),
        ({"max_positions": 3, "learned_positions": 3}, "did you mean 'learnt_positions'"),
    ],
)
def test_errors_say_what_to_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


def test_more_tokens_than_positions() -> None:
    model, cache = tiny(learnt_positions=4), FastWeightsCache()
    model(tokens(1, 4), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="reaches position 4, the model has learnt_positions = 4"):
        model(tokens(1, 1), past_key_values=cache)
    assert model(
        torch.zeros(1, 8, dtype=torch.long), segments=torch.tensor([[0] * 4 + [1] * 4])
    ).logits.shape == (
        1,
        8,
        VOCABULARY,
    )


def test_fields_of_earlier_checkpoints_are_read() -> None:
    mixers = [
        {"name": "mla", "turned": 4, "beside": [{"name": "mamba3", "still": False}]},
        {"name": "metala"},
    ]
    config = tiny_config(num_hidden_layers=2)
    stored = {**config.to_dict(), "norms_behind": [True], "mixers": mixers}
    del stored["post_norm"]
    read = type(config).from_dict(stored)
    assert read.post_norm == [True]
    beside = [{"name": "mamba3", "partial_rotation": False}]
    assert read.mixers == [{"name": "mla", "rope_dim": 4, "beside": beside}, mixers[1]]


def test_stochastic_depth_leaves_out_layers_of_examples_in_training() -> None:
    """In proportion to their depth; what is kept is scaled, so that the mean stays."""
    torch.manual_seed(0)
    fields = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 3, "stochastic_depth": 0.5}
    model = FastWeightsForCausalLM(FastWeightsConfig(**fields, mixers=[{"name": "linear"}]))
    depths = [block.depth for block in model.model.layers]
    x = torch.ones(4000, 1, 1)
    assert torch.equal(depths[0](x), x)
    for depth, p in ((depths[1], 0.25), (depths[2], 0.5)):
        y = depth(x)
        torch.testing.assert_close(y.unique(), torch.tensor([0.0, 1 / (1 - p)]))
        assert y.mean().item() == pytest.approx(1, abs=0.06)
        assert torch.equal(depth.eval()(x), x)
    tokens = torch.randint(8, (1, 5))
    first, second = (model.train()(tokens).logits for _ in range(2))
    assert not torch.equal(first, second)
