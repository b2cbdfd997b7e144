"""Linearized models on disk: they come back as they were, whole, in pieces, or as adapters of the
softmax model.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
)

from families import SOME_FAMILIES, padded, read_anew, shaken, student, teacher
from fastweights.linearize import (
    LinearAttentionConfig,
    Teacher,
    branches,
    linearize,
    use_mode,
)
from fastweights.linearize.convert.transformers_seams import implementation_of
from tolerances import SAME, error
from transformers_log import transformers_warnings

pytestmark = pytest.mark.sampled

LORA = {
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_saved_model_is_the_same(family: str, tmp_path: Path) -> None:
    original = teacher(family)
    original.save_pretrained(tmp_path / "softmax")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "softmax")
    model = shaken(linearize(loaded, LinearAttentionConfig(window=4)))
    model.save_pretrained(tmp_path / "linear")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "linear")
    assert type(again) is type(model)
    assert again.config.model_type == f"linearized_{family}"
    assert torch.equal(read_anew(again), read_anew(model))
    assert branches(again).keys() == branches(model).keys()


HEADS = {
    "AutoModel": AutoModel,
    "sequences": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}
HEADLESS = {
    "sequences": "granite ernie4_5 cohere apertus bitnet nanochat cohere2 cwm olmoe granitemoe "
    "ernie4_5_moe minimax_m2 glm4_moe",
    "tokens": "olmo olmo2 granite ernie4_5 hunyuan_v1_dense opt cohere bitnet nanochat gemma3_text "
    "olmo3 cohere2 cwm olmoe phimoe granitemoe ernie4_5_moe minimax_m2 deepseek_v2 glm4_moe",
}
"""Families that have no such class in transformers."""


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_other_heads_read_what_the_language_model_reads(
    family: str, head: str, tmp_path: Path
) -> None:
    model = student(family)
    model.save_pretrained(tmp_path)
    if family in HEADLESS.get(head, "").split():
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            HEADS[head].from_pretrained(tmp_path)
        return
    other, info = HEADS[head].from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    if implementation_of(other.config) != implementation_of(model.config):
        pytest.skip("this transformers loads the family by sdpa, without its soft cap")
    assert all("score" in name or "classifier" in name for name in info["missing_keys"])
    assert branches(other).keys() == branches(model).keys()
    with torch.no_grad():
        want, got = (x.base_model(**padded(), use_cache=False)[0] for x in (model, other.eval()))
        assert torch.isfinite(other(**padded())[0]).all()
    assert torch.equal(got, want)


@pytest.mark.parametrize("head", HEADS)
def test_other_heads_are_saved_and_lead_back(head: str, tmp_path: Path) -> None:
    model = student()
    model.save_pretrained(tmp_path / "language")
    other = HEADS[head].from_pretrained(tmp_path / "language")
    other.save_pretrained(tmp_path / "other")
    again = HEADS[head].from_pretrained(tmp_path / "other")
    assert type(again) is type(other)
    assert torch.equal(again(**padded())[0], other(**padded())[0])
    assert type(pickle.loads(pickle.dumps(other))) is type(other)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert branches(back).keys() == branches(model).keys()
    for layer, branch in branches(back).items():
        assert torch.equal(branch.mix, branches(model)[layer].mix)


def test_a_classifier_trains_its_branches(tmp_path: Path) -> None:
    student().save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    loss = model(**padded(), labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert all(
        p.grad is not None for branch in branches(model).values() for p in branch.parameters()
    )
    with use_mode(model, Teacher()), torch.no_grad():
        assert error(model(**padded(), labels=torch.tensor([0, 2])).loss, loss.detach()) > SAME


def test_the_softmax_configuration_is_read_without_a_warning(tmp_path: Path) -> None:
    """peft asks the class of a model's configuration for that of the base model."""
    teacher().save_pretrained(tmp_path / "softmax")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "softmax")
    model = adapted(linearize(base, LinearAttentionConfig(window=4)))
    with transformers_warnings() as said:
        model.save_pretrained(tmp_path / "adapter")
        read_again = type(model.config).from_pretrained(tmp_path / "softmax")
    assert not said
    assert base.config.model_type == "linearized_llama"
    assert read_again.model_type == "llama"


def test_the_configuration_says_what_was_done(tmp_path: Path) -> None:
    student(analog=LinearAttentionConfig(window=3, features="relu"), layers=[0, 2]).save_pretrained(
        tmp_path
    )
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "linearized_llama"
    assert saved["architectures"] == ["LinearizedLlamaForCausalLM"]
    assert saved["linearize"]["analog"]["features"] == "relu"
    assert [site["layer"] for site in saved["linearize"]["sites"]] == [0, 2]
    assert type(AutoConfig.from_pretrained(tmp_path)).__name__ == "LinearizedLlamaConfig"


def test_pieces_and_softmax_implementations(tmp_path: Path) -> None:
    model = student()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(read_anew(whole), read_anew(model))
    for softmax in ("eager", "sdpa"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=softmax)
        assert again.config._attn_implementation == f"linearized_{softmax}"
        with use_mode(again, Teacher()):
            assert error(read_anew(again), read_anew(teacher(attn_implementation=softmax))) <= SAME
    again.set_attn_implementation("eager")
    assert again.config._attn_implementation == "linearized_eager"


def test_branches_stay_in_float32(tmp_path: Path) -> None:
    teacher().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    shaken(linearize(model, LinearAttentionConfig(window=4))).save_pretrained(tmp_path)
    for options in ({}, {"dtype": torch.bfloat16}):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        dtypes = {
            name.split(".")[-1] in ("W", "mix"): weight.dtype
            for name, weight in again.named_parameters()
        }
        assert dtypes == {True: torch.float32, False: torch.bfloat16}
        assert torch.equal(read_anew(again), read_anew(model))


def test_what_a_checkpoint_lacks_starts_anew(tmp_path: Path) -> None:
    model = linearize(teacher(), LinearAttentionConfig(window=4))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as saved:
        metadata = saved.metadata()
    kept = {name: tensor for name, tensor in load_file(file).items() if "linear_branch" not in name}
    save_file(kept, file, metadata)
    assert torch.equal(read_anew(AutoModelForCausalLM.from_pretrained(tmp_path)), read_anew(model))


PROGRAM = """
import sys, torch, fastweights
from transformers import AutoModelForCausalLM
print(any(".modeling_llama" in name for name in sys.modules))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(3, 20)[None]
print(type(model).__name__, float(model(ids).logits.double().sum()))
"""


@pytest.mark.slow
def test_another_process_needs_one_import_which_loads_no_family(tmp_path: Path) -> None:
    model = student()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = float(model(torch.arange(3, 20)[None]).logits.double().sum())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    loaded, name, total = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert loaded == "False"
    assert name == "LinearizedLlamaForCausalLM"
    assert error(torch.tensor(float(total)), torch.tensor(want)) <= SAME


# adapters -----------------------------------------------------------------------------------------


def adapted(model: Any, **options: Any) -> Any:
    """With adapters that are not zero."""
    wrapped = get_peft_model(model, LoraConfig(**LORA, **options))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return wrapped.eval()


def test_adapters_of_a_linearized_model(tmp_path: Path) -> None:
    student().save_pretrained(tmp_path / "linear")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "linear")
    model = adapted(base)
    want = read_anew(model)
    with model.disable_adapter():
        assert error(read_anew(model), read_anew(student())) <= SAME
        with use_mode(model, Teacher()):
            assert error(read_anew(model), read_anew(teacher())) <= SAME
    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "linear")
    assert torch.equal(read_anew(PeftModel.from_pretrained(fresh, tmp_path / "adapter")), want)
    assert torch.equal(
        read_anew(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), want
    )


def test_merged_models_are_saved_whole(tmp_path: Path) -> None:
    model = adapted(student())
    want = read_anew(model)
    merged = model.merge_and_unload()
    assert error(read_anew(merged), want) <= SAME
    merged.save_pretrained(tmp_path)
    assert torch.equal(read_anew(AutoModelForCausalLM.from_pretrained(tmp_path)), read_anew(merged))


def test_adapters_generate_with_a_constant_cache() -> None:
    model = adapted(student(), modules_to_save=["linear_branch"])
    inputs = padded()
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    got, want = (model.generate(**inputs, **lengths, use_cache=cached) for cached in (True, False))
    assert torch.equal(got, want)


# quantised weights --------------------------------------------------------------------------------


BLOCKS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""4-bit weights come in blocks of 64."""


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_may_be_quantised(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    config = type(teacher().config).from_dict({**teacher().config.to_dict(), **BLOCKS})
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path / "softmax")
    linearize(original, LinearAttentionConfig(window=64)).save_pretrained(tmp_path / "linear")
    options = {"quantization_config": quantised, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "softmax", **options)
    want = read_anew(model)
    assert error(read_anew(linearize(model, LinearAttentionConfig(window=64))), want) <= SAME
    assert {w.dtype for w in branches(model)[0].parameters()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "linear", **options)
    assert error(read_anew(loaded), want) <= SAME
