"""transformers' `generate` by packed calls of C: the tokens of the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.kernels.native import library
from fastweights.linearize import LinearAttentionConfig, place_landmarks
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.cache_names import CACHE
from fastweights.models.token_reader import TokenReader
from pretrained import VOCABULARY, linear_llama

pytestmark = pytest.mark.skipif(library.extension_missing(), reason="needs the compiled kernels")

IDS = torch.arange(24).view(3, 8) * 5 % (VOCABULARY - 1) + 1  # 0 is the padding
TOKENS = 12


def softmax() -> Any:
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        mixers=[{"name": "softmax", "heads": 4, "kv_heads": 2}],
    )
    return FastWeightsForCausalLM(config).eval()


def linearized() -> Any:
    return linear_llama(LinearAttentionConfig(window=3), 3, torch.float32).eval()


def hybrid() -> Any:
    return linear_llama(LinearAttentionConfig(window=3), 3, torch.float32, [0, 2]).eval()


MODELS = {"softmax": softmax, "linearized": linearized, "hybrid": hybrid}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the step has answered, for every call of a model that generates."""
    found, answer = [], TokenReader.answer

    def spy(self: TokenReader, call: dict[str, Any]) -> Any:
        read = answer(self, call)
        found.append(read is not None)
        return read

    monkeypatch.setattr(TokenReader, "answer", spy)
    return found


def generate(model: Any, ids: torch.Tensor = IDS, **settings: Any) -> Any:
    torch.manual_seed(1)
    many = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
    return model.generate(ids, **{"do_sample": False, **many, **settings})


def by_modules(model: Any, *args: Any, **settings: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenReader, "answer", lambda self, call: None)
        return generate(model, *args, **settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequences", [1, 3])
def test_all_tokens_behind_the_prompt_are_read_by_the_step(
    name: str, sequences: int, answered: list[bool]
) -> None:
    model, ids = MODELS[name](), IDS[:sequences]
    found = generate(model, ids)
    assert answered == [False] + [True] * (TOKENS - 1)
    assert torch.equal(found, by_modules(model, ids))


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": True, "top_k": 5}, {"num_beams": 2}, {"repetition_penalty": 1.3}],
    ids=lambda settings: next(iter(settings)),
)
def test_every_way_of_choosing_tokens(settings: dict[str, Any], answered: list[bool]) -> None:
    model, mask = linearized(), torch.ones_like(IDS)
    mask[0, :3] = 0
    for given in (settings, {**settings, "attention_mask": mask}):
        found = generate(model, **given)
        assert any(answered)
        assert torch.equal(found, by_modules(model, **given))
        answered.clear()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_beside_padding(name: str, side: str, answered: list[bool]) -> None:
    """A hybrid's softmax layers are told of it by the mask, which the step does not read."""
    model, mask = MODELS[name](), torch.ones_like(IDS)
    if side == "left":
        mask[0, :5], mask[2, :1] = 0, 0
    else:
        mask[0, 3:], mask[2, -1:] = 0, 0
    found = generate(model, attention_mask=mask)
    assert answered == [False] + [name != "hybrid"] * (TOKENS - 1)
    assert torch.equal(found, by_modules(model, attention_mask=mask))


@pytest.mark.parametrize("features", ["landmarks", "hedgehog"])
def test_each_sequence_behind_padding_has_its_own_positions(
    features: str, answered: list[bool]
) -> None:
    config = LinearAttentionConfig(features, 4, window=3, sinks=2 * (features == "landmarks"))
    model = linear_llama(config, 3, torch.float32)
    if features == "landmarks":
        place_landmarks(model, [{"input_ids": IDS}])
    model.eval()
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    logits = {"return_dict_in_generate": True, "output_logits": True}
    found = generate(model, attention_mask=mask, **logits)
    same = by_modules(model, attention_mask=mask, **logits)
    alone = generate(model, IDS[:1, 5:], **logits)
    assert sum(answered) > TOKENS
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(same.logits))
    mine = torch.stack(found.logits)[:, :1]
    torch.testing.assert_close(mine, torch.stack(alone.logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_can_be_gone_on_from_with_gradients(name: str) -> None:
    model = MODELS[name]()
    found, same = (
        read(model, return_dict_in_generate=True, output_logits=True)
        for read in (generate, by_modules)
    )
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(same.logits))
    cache = getattr(found, CACHE)
    loss = model(IDS[:, :2], use_cache=True, **{CACHE: cache}).logits.sum()
    loss.backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_hidden_states_hooks_and_calls_outside_are_those_of_modules(answered: list[bool]) -> None:
    model = linearized()
    generate(model, output_hidden_states=True, return_dict_in_generate=True)
    seen: list[int] = []
    handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    generate(model)
    handle.remove()
    assert not any(answered)
    assert len(seen) == TOKENS
    answered.clear()
    with torch.no_grad():
        cache = getattr(model(IDS, use_cache=True), CACHE)
        model(IDS[:, :1], use_cache=True, **{CACHE: cache})
    assert not answered
