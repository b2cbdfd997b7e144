"""What transformers' pipelines and PEFT do with our models, and with linearized ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.testing import assert_close
from transformers import PreTrainedModel, pipeline

from fastweights import FastWeightsForCausalLM, stream
from fastweights.training.data.tokenizers import Bytes
from pretrained import linear_llama
from tiny import LAYERS, tiny, tokens

every_model = pytest.mark.parametrize("layers", LAYERS)
TOKENIZER = Bytes().build([])
BUILDS: dict[str, Callable[[], PreTrainedModel]] = {
    "metala": lambda: tiny("metala"),
    "hybrid": lambda: tiny("hybrid"),
    "linearized": linear_llama,
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def speaking(layers: str = "hybrid", **fields: Any) -> FastWeightsForCausalLM:
    """A model of bytes."""
    return tiny(layers, vocab_size=len(TOKENIZER), **fields)


def read(*texts: str, side: str = "right") -> dict[str, torch.Tensor]:
    TOKENIZER.padding_side = side
    return dict(TOKENIZER(list(texts), return_tensors="pt", padding=True))


def continuation(model: PreTrainedModel, text: str, new: int = 6) -> list[int]:
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()


# generate -----------------------------------------------------------------------------------------


def test_stop_strings() -> None:
    model, prompt = speaking(), read("where to")
    letters = range(ord("a"), ord("z") + 1)
    others = [token for token in range(len(TOKENIZER)) if token not in letters]
    settings = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": others}
    free = model.generate(**prompt, **settings)
    word = TOKENIZER.decode(free[0, 10:12])
    stopped = model.generate(**prompt, **settings, stop_strings=[word], tokenizer=TOKENIZER)
    assert stopped.shape[1] < free.shape[1]
    assert TOKENIZER.decode(stopped[0]).endswith(word)


@pytest.mark.parametrize(
    "arguments", [{}, {"prefill_chunk_size": 3}, {"use_cache": False}, {"num_beams": 2}]
)
def test_right_padded_prompts_continue_as_if_alone(arguments: dict[str, Any]) -> None:
    model, texts = speaking(), ("a", "a longer one")
    prompt = read(*texts)
    settings = {"max_new_tokens": 6, "do_sample": False, **arguments}
    made = model.generate(**prompt, **settings)[:, prompt["input_ids"].shape[1] :]
    for row, text in zip(made, texts, strict=True):
        ids = torch.tensor([TOKENIZER(text)["input_ids"]])
        alone = model.generate(ids, **settings)
        assert row.tolist() == alone[0, ids.shape[1] :].tolist()


def test_stream_takes_padding_on_either_side() -> None:
    model, texts = speaking(), ("a", "a longer one")
    for side in ("left", "right"):
        prompt = read(*texts, side=side)
        settings = {"max_new_tokens": 6, "temperature": 0, "chunk": 5}
        tokens = torch.stack(list(stream(model, **prompt, **settings)), 1)
        assert tokens.tolist() == [continuation(model, text) for text in texts]


@pytest.mark.sampled
@every_model
def test_right_padding_leaves_no_trace(layers: str) -> None:
    model, ids = tiny(layers), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    padded = model(ids, attention_mask=mask, labels=labels)
    short, whole = (model(one, labels=one) for one in (ids[:1, :5], ids[1:]))
    assert_close(padded.logits[0, :5], short.logits[0])
    assert_close(padded.logits[1], whole.logits[0])
    assert_close(padded.loss, (4 * short.loss + 8 * whole.loss) / 12)


def test_unknown_arguments_are_refused_by_name() -> None:
    model, prompt = speaking(), read("a")
    with pytest.raises(ValueError, match="colour"):
        model.generate(**prompt, colour=3)
    with pytest.raises(TypeError, match="no argument called colour"):
        model(**prompt, colour=3)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_pipeline_in_batches(batch_size: int) -> None:
    model, texts = speaking(dtype=torch.float32), ["a", "a longer one", "two"]
    generator = pipeline("text-generation", model=model, tokenizer=TOKENIZER, device="cpu")
    settings: Any = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    made = generator(texts, batch_size=batch_size, **settings)
    expected = [continuation(model, text) for text in texts]
    assert [one[0]["generated_text"] for one in made] == [
        TOKENIZER.decode(ids, skip_special_tokens=True) for ids in expected
    ]


# PEFT ---------------------------------------------------------------------------------------------


@pytest.mark.sampled
@every_model
def test_adapters_find_projections_of_every_mixer(layers: str) -> None:
    model: Any = get_peft_model(tiny(layers), LoraConfig(task_type="CAUSAL_LM"))
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert {f"layers.{i}.mixer" for i in range(len(model.get_base_model().model.layers))} == {
        ".".join(name.split("model.")[-1].split(".")[:3]) for name in adapted
    }


def test_adapters_of_linearized_models_go_where_the_originals_do() -> None:
    model: Any = get_peft_model(linear_llama(), LoraConfig(task_type="CAUSAL_LM"))
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert {name.rsplit(".", 1)[-1] for name in adapted} == {"q_proj", "v_proj"}
    assert len(adapted) == 4


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@every_build
def test_prompt_tuning(build: Callable[[], PreTrainedModel]) -> None:
    ids, config = tokens(2, 5), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model: Any = get_peft_model(build(), config)
    model(ids, labels=ids).loss.backward()
    assert (model.prompt_encoder.default.embedding.weight.grad != 0).any()
    model.eval()
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
    )
    expected = ids
    with torch.no_grad():
        for _ in range(3):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, expected)


@every_build
def test_prefix_tuning_is_refused_by_name(build: Callable[[], PreTrainedModel]) -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model: Any = get_peft_model(build(), config)
    with pytest.raises((TypeError, ValueError), match=r"prefix tuning is impossible.*LoRA"):
        model(tokens(2, 5))
