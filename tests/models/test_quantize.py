"""Models whose weights are bytes, or half bytes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)

from fastweights import MIXERS
from fastweights.models import FewBitsConfig, Int4Linear, Int8Embedding, Int8Linear, quantize
from fastweights.models.cache_names import CACHE, cache_argument
from fastweights.ops.quantized import GROUP, round_in_groups
from kinds import form_of, one_of_each
from pretrained import linear_llama, llama
from tiny import tiny, tokens

LENGTH, PROMPT = 10, 4
LINEAR = Int8Linear | Int4Linear


def layers_of(model: nn.Module, kind=LINEAR) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, kind)]


def as_floats(model: nn.Module) -> nn.Module:
    """The quantized model, of torch's own layers with the weights that its codes stand for."""
    for parent in list(model.modules()):
        for name, part in parent.named_children():
            if isinstance(part, LINEAR | Int8Embedding):
                setattr(parent, name, of_torch(part))
    return model


def of_torch(part: nn.Module) -> nn.Module:
    outputs, weight = len(part.codes), part.stored.rows(slice(None), torch.float32)
    if isinstance(part, Int8Embedding):
        return nn.Embedding(*weight.shape, _weight=weight)
    layer = nn.Linear(weight.shape[1], outputs, bias=part.bias is not None)
    layer.weight = nn.Parameter(weight)
    layer.bias = None if part.bias is None else nn.Parameter(part.bias)
    layer.register_forward_pre_hook(lambda _, given: (round_in_groups(given[0]),))
    return layer


@torch.no_grad()
def compare(model, bits: int) -> None:
    """Quantized, it computes what it computes with the rounded weights as floats; from its cache
    what it computes at once.
    """
    ids, before = tokens(2, LENGTH), model(input_ids=tokens(2, LENGTH)).logits
    count = sum(type(part).__name__ == "Linear" for part in model.modules())
    assert quantize(model, bits) is model
    assert len(layers_of(model)) == count > 0
    expected = as_floats(deepcopy(model))(input_ids=ids).logits
    found = model(input_ids=ids).logits
    largest = expected.abs().max()
    # what is rounded to the other side differs by 2⁻¹⁵ of a group's largest
    assert (found - expected).abs().max() <= 3e-4 * largest
    assert not torch.equal(expected, before)
    cache, parts = None, []
    for piece in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)):
        read = model(input_ids=piece, use_cache=True, **cache_argument(cache))
        cache, parts = getattr(read, CACHE), [*parts, read.logits]
    # a token that is rounded to the other side differs by 2⁻¹⁵ of a group's largest
    assert (torch.cat(parts, 1) - found).abs().max() <= 3e-4 * largest


@pytest.mark.parametrize("name", one_of_each([*MIXERS, "hybrid"], form_of))
def test_ours(name: str) -> None:
    compare(tiny(name, torch.float32), 8)


@pytest.mark.parametrize("name", ["metala", "mesa", "softmax"])
def test_ours_of_four_bits(name: str) -> None:
    model = tiny(name, torch.float32, hidden_size=64)
    compare(model, 4)
    assert layers_of(model, Int4Linear)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", [llama, linear_llama])
def test_models_of_transformers(make, bits: int) -> None:
    compare(make(dtype=torch.float32, hidden_size=64), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    layer = nn.Linear(500, 400).to(dtype)
    with torch.no_grad():
        layer.weight[2] = 0
        layer.weight[3] = 1e-40
    stored = Int8Linear(layer).stored
    error = (stored.rows(slice(None), torch.float32) - layer.weight.float()).abs()
    half_a_step = stored.scale.float().repeat_interleave(GROUP, 1)[:, :500] / 2
    assert (error <= half_a_step * (1 + 1e-2) + 2**-25).all()
    assert (stored.codes[:2, :480].unflatten(1, (-1, GROUP)).abs().amax(-1) == 127).all()


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_codes_keep_their_dtypes(bits: int) -> None:
    """A model loaded in bfloat16, rounded and computed in float32 is that rounded in float32."""
    model = llama(dtype=torch.bfloat16, hidden_size=64, tie_word_embeddings=True)
    wide, rounded = deepcopy(model).float(), quantize(model, bits)
    kept = {name: b.dtype for name, b in rounded.named_buffers() if "scale" in name}
    ids = tokens(1, LENGTH)
    assert rounded(input_ids=ids).logits.dtype is torch.bfloat16
    found = rounded.float()(input_ids=ids).logits
    assert {name: b.dtype for name, b in rounded.named_buffers() if "scale" in name} == kept
    torch.testing.assert_close(found, quantize(wide, bits)(input_ids=ids).logits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", [llama, lambda **named: tiny("metala", torch.float32, **named)])
def test_a_head_shares_the_codes_of_the_embeddings(make, bits: int) -> None:
    model = quantize(make(tie_word_embeddings=True), bits)
    assert type(model.lm_head) is Int8Linear
    assert type(model.get_input_embeddings()) is Int8Embedding
    assert model.lm_head.codes is model.get_input_embeddings().codes
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens(1, LENGTH))
        found = model(inputs_embeds=embedded).logits
        assert torch.equal(found, model(input_ids=tokens(1, LENGTH)).logits)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_that_is_there_twice_is_rounded_once(bits: int) -> None:
    layer = nn.Linear(GROUP, GROUP)
    first, second = quantize(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)), bits)
    assert first[0].codes is second[0].codes


def test_widths_that_groups_do_not_fill_are_of_eight_bits() -> None:
    layers = quantize(nn.Sequential(nn.Linear(GROUP, 5), nn.Linear(5, GROUP)), 4)
    assert list(map(type, layers)) == [Int4Linear, Int8Linear]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.28), (4, 0.19)])
def test_what_it_takes(bits: int, most: float) -> None:
    model = tiny("metala", torch.float32, hidden_size=256, num_hidden_layers=4)
    before = sum(p.nbytes for p in model.parameters())
    quantize(model, bits)
    after = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    assert after < most * before


@pytest.mark.parametrize(("bits", "largest", "stays"), [
    (4, 1e5, True), (4, 3e4, False), (8, 1e5, False), (8, 1e7, True), (8, 9e-4, True),
    (4, 9e-4, True), (4, 2e-3, False), (8, 0, False), (4, torch.inf, True), (8, torch.nan, True),
])  # fmt: skip
def test_weights_that_float16_does_not_hold_well_stay(
    bits: int, largest: float, *, stays: bool
) -> None:
    strange = nn.Linear(GROUP, 2)
    with torch.no_grad():
        strange.weight.mul_(0)[1, 3] = largest
    layers = quantize(nn.Sequential(nn.Linear(GROUP, GROUP), strange), bits)
    assert isinstance(layers[0], LINEAR)
    assert (layers[1] is strange) == stays


@pytest.mark.parametrize("bits", [0, 2, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="they are of 8 or of 4"):
        quantize(nn.Sequential(nn.Linear(GROUP, 2)), bits)


def gemma(**named: Any) -> Gemma3ForCausalLM:
    """Whose embeddings are multiplied by a factor."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"vocab_size": 41, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **named)).eval()


MODELS = {
    "gemma": gemma,
    "llama": lambda **named: llama(dtype=torch.float32, hidden_size=64, **named),
    "linearized": lambda **named: linear_llama(dtype=torch.float32, hidden_size=64, **named),
    "ours": lambda **named: tiny("gated_deltanet", torch.float32, hidden_size=64, **named),
}


def load(folder: Path, **named: Any) -> PreTrainedModel:
    """The model of a folder, which lacks nothing and has nothing to spare."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **named)
    assert not any(info.values()), info
    return model


def require_same(found: PreTrainedModel, model: PreTrainedModel) -> None:
    """The same codes, and the same logits to the bit."""
    assert {type(part) for part in layers_of(found)} == {type(part) for part in layers_of(model)}
    wanted = model.state_dict()
    assert found.state_dict().keys() == wanted.keys()
    assert all(torch.equal(values, wanted[name]) for name, values in found.state_dict().items())
    assert all(t.dtype is wanted[name].dtype for name, t in found.state_dict().items())
    assert torch.equal(found(tokens(1, LENGTH)).logits, model(tokens(1, LENGTH)).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_it_is_saved_and_loaded(make: str, bits: int, *, tied: bool, tmp_path) -> None:
    model = MODELS[make](tie_word_embeddings=tied).eval()
    floats = sum(p.nbytes for p in model.parameters())
    quantize(model, bits).save_pretrained(tmp_path / "first")
    size = (tmp_path / "first" / "model.safetensors").stat().st_size
    assert size < floats * (0.5 if bits == 8 else 0.4)
    found = load(tmp_path / "first")
    require_same(found, model)
    found.save_pretrained(tmp_path / "second")
    again = load(tmp_path / "second")
    require_same(again, model)
    head, embeddings = again.lm_head, again.get_input_embeddings()
    assert (head.codes.data_ptr() == embeddings.codes.data_ptr()) == tied


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_it_is_rounded_while_it_is_loaded(make: str, bits: int, *, tied: bool, tmp_path) -> None:
    model = MODELS[make](tie_word_embeddings=tied).eval()
    model.save_pretrained(tmp_path)
    found = load(tmp_path, quantization_config=FewBitsConfig(bits))
    require_same(found, quantize(model, bits))


def test_embeddings_with_a_factor_are_rounded() -> None:
    model = gemma()
    wanted = model.get_input_embeddings()(tokens(1, LENGTH))
    embeddings = quantize(model).get_input_embeddings()
    assert type(embeddings) is Int8Embedding
    torch.testing.assert_close(embeddings(tokens(1, LENGTH)), wanted, rtol=0, atol=0.02)


class OtherEmbedding(nn.Embedding):
    """Of which nothing is known."""


@torch.no_grad()
def test_a_head_stays_that_shares_its_weight_with_what_stays() -> None:
    model = llama(dtype=torch.float32, hidden_size=64, tie_word_embeddings=True)
    embeddings = model.get_input_embeddings()
    embeddings.__class__ = OtherEmbedding
    quantize(model)
    assert model.get_input_embeddings() is embeddings
    assert model.lm_head.weight is embeddings.weight


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.up_proj"])
@torch.no_grad()
def test_what_stays_is_said_and_saved(name: str, tmp_path) -> None:
    model = llama(dtype=torch.float32, hidden_size=64, tie_word_embeddings=True)
    model.get_submodule(name).weight[0, 0] = 1e7
    model.save_pretrained(tmp_path / "floats")
    loaded = load(tmp_path / "floats", quantization_config=FewBitsConfig(8))
    require_same(loaded, quantize(model))
    kept = loaded.config.quantization_config.modules_to_not_convert
    assert name in kept
    assert sorted(kept) == sorted(model.config.quantization_config.modules_to_not_convert)
    loaded.save_pretrained(tmp_path / "codes")
    require_same(load(tmp_path / "codes"), model)


def test_twice_is_refused() -> None:
    model = quantize(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match="is it quantized already"):
        quantize(model)
