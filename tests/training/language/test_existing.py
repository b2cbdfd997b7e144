"""Training that begins with an existing model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastweights import MIXERS
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.linearize.convert.model_classes import LinearizedModel
from fastweights.models import FastWeightsForCausalLM
from fastweights.train import (
    BPE,
    AdamW,
    Architecture,
    Bytes,
    CheckpointError,
    ExistingModel,
    LoRA,
    TrainConfig,
    TrainingError,
    train,
)
from fastweights.training.language.adapters import add_adapters, linear_layers
from fastweights.training.language.existing import fingerprint
from fastweights.training.loop.files import remove_folder
from killable_runs import end_of, sitting, stop_after, tiny

SIZES = {"hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **HEADS, "num_key_value_heads": 1, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {**SIZES, **HEADS},
    "mamba": {**SIZES, "state_size": 4},
}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
KEPT = LoRA(4, 8.0, dropout=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a run ``own``, and models of transformers."""
    folder = tmp_path_factory.mktemp("existing")
    train(tiny(folder), folder / "own", cpu=True)
    for family in FAMILIES:
        save(softmax(family, folder), folder / family, folder)
    linear = linearize(softmax("llama", folder), LinearAttentionConfig(window=3))
    save(linear, folder / "linear", folder)
    return folder


def softmax(family: str, folder: Path) -> Any:
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "own" / "model"))
    torch.manual_seed(0)
    fields = {**FAMILIES[family], **SPECIAL, "vocab_size": vocabulary}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))


def save(model: Any, target: Path, folder: Path) -> Path:
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder / "own" / "model").save_pretrained(target)
    return target


def going_on(folder: Path, source: Path | str, lora: LoRA | None = None, **changes) -> TrainConfig:
    model = ExistingModel(str(source), lora)
    text = replace(tiny(folder).text, tokenization=model.tokenization)
    return tiny(folder, model=model, text=text, optimizer=AdamW(lr=3e-3), **changes)


def changed(before: Path, after: Path) -> set[str]:
    """The names of tensors that training has changed."""
    one, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (before, after)
    )
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.sampled
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((name, None) for name in ("own", "linear")),
        *((name, KEPT) for name in ("linear", "gpt2")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mamba", None), ("own", KEPT), ("gpt_neox", KEPT))
        ),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_end(folder, tmp_path, name, lora):
    before = folder / name / "model" if name == "own" else folder / name
    config = going_on(folder, folder / name, lora)
    train(config, tmp_path / "once", cpu=True)
    train(config, tmp_path / "twice", cpu=True, stop=stop_after(3))
    assert not (tmp_path / "twice" / "model").exists()
    train(going_on(folder, folder / name, lora), tmp_path / "twice", cpu=True)
    assert end_of(tmp_path / "once") == end_of(tmp_path / "twice")
    after = changed(before, tmp_path / "once" / "model")
    embeddings = {part for part in after if "embed" in part or "wte" in part}
    assert bool(embeddings) == (lora is None)
    assert after


def test_an_unfinished_run_of_adapters_has_no_model_yet(folder, tmp_path):
    train(going_on(folder, folder / "own", LoRA()), tmp_path, cpu=True, stop=stop_after(2))
    with pytest.raises(CheckpointError, match=r"step-0+2 has adapters without their model"):
        ExistingModel(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [17, 33])
def test_killed_while_writing_with_adapters(folder, tmp_path, calls):
    config = going_on(folder, folder / "own", LoRA())
    train(config, tmp_path / "once", cpu=True)
    sitting(config, tmp_path / "out", calls).join()
    train(config, tmp_path / "out", cpu=True)
    assert end_of(tmp_path / "out") == end_of(tmp_path / "once")


def test_what_is_trained_is_what_is_said(folder):
    """Adapters on every linear layer but the head; the branches of a linearized model whole."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "linear")
    model = ExistingModel(str(folder / "linear"), LoRA()).build(tokenizer)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    whole = {name for name in trained if "lora_" not in name}
    assert whole == {name for name in trained if "linear_branch.modules_to_save" in name}
    projections = {name.split(".lora_")[0].rpartition(".")[2] for name in trained - whole}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert projections == attention | {"gate_proj", "up_proj", "down_proj"}
    assert all("linear_branch" not in name for name in trained - whole)


@pytest.mark.sampled
@pytest.mark.parametrize("name", MIXERS)
def test_no_mixer_reads_past_its_adapters(name):
    torch.manual_seed(0)
    model = Architecture(({"name": name},), layers=1, width=32).build(Bytes().build(()))
    adapted = add_adapters(model, LoRA(2, 4.0))
    for parameter in trained_matrices(adapted, "lora_B"):
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 256, (2, 12))
    adapted(input_ids=ids, labels=ids).loss.backward()
    matrices = [*trained_matrices(adapted, "lora_A"), *trained_matrices(adapted, "lora_B")]
    assert matrices
    assert all(p.grad is not None and p.grad.any() for p in matrices)


def trained_matrices(model: Any, name: str) -> list[torch.nn.Parameter]:
    return [p for path, p in model.named_parameters() if name in path]


def test_projections_that_are_read_directly_get_no_adapters(folder):
    names = {path.rpartition(".")[2] for path in linear_layers(softmax("mamba", folder), ())}
    assert names == {"in_proj", "x_proj"}


@pytest.mark.long
def test_the_results_are_plain_models_of_their_class(folder, tmp_path):
    train(going_on(folder, folder / "linear", LoRA()), tmp_path / "linear", cpu=True)
    train(going_on(folder, folder / "own"), tmp_path / "own", cpu=True)
    linear = AutoModelForCausalLM.from_pretrained(tmp_path / "linear" / "model")
    assert isinstance(linear, LinearizedModel)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "own" / "model")
    assert isinstance(own, FastWeightsForCausalLM)


@pytest.mark.long
def test_adapter_and_base_make_the_merged_model(folder, tmp_path):
    from peft import PeftModel

    train(going_on(folder, folder / "linear", LoRA()), tmp_path / "out", cpu=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "linear", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").state_dict()
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(tensor, merged[name])


def test_bfloat16_checkpoints_are_trained_and_saved_in_float32(folder, tmp_path):
    source = save(softmax("llama", folder).to(torch.bfloat16), tmp_path / "half", folder)
    config = going_on(folder, source)
    assert isinstance(config.model, ExistingModel)
    assert config.model.stored_dtype == "bfloat16"
    train(config, tmp_path / "out", cpu=True)
    weights = load_file(tmp_path / "out" / "model" / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


# Where it begins


def test_a_changed_model_is_noticed(folder, tmp_path):
    source = save(softmax("llama", folder), tmp_path / "llama", folder)
    train(going_on(folder, source), tmp_path / "out", cpu=True, stop=stop_after(2))
    weights = load_file(source / "model.safetensors")
    save_file({name: x + 1e-3 for name, x in weights.items()}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"another run \(model.weights was sha256:.*, is sha"):
        train(going_on(folder, source), tmp_path / "out", cpu=True)


def test_the_fingerprint_is_of_weights_and_configuration(folder, tmp_path):
    source = save(softmax("gpt2", folder), tmp_path / "gpt2", folder)
    found = fingerprint(str(source))
    assert found == fingerprint(str(folder / "gpt2"))
    (source / "notes.txt").write_text("of no account")
    assert found == fingerprint(str(source))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attn_pdrop": 0.5}))
    assert found != fingerprint(str(source))


def test_a_model_of_the_hub_is_known_by_its_commit(folder, tmp_path, monkeypatch):
    """A download as huggingface_hub keeps it, read without a network."""
    commit, kept = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--some--llama"
    save(softmax("llama", folder), kept / "snapshots" / commit, folder)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fingerprint("some/llama") == f"commit:{commit}"
    model = ExistingModel("some/llama", weights="commit:other")
    assert (model.weights, model.folder, model.name) == ("commit:other", "some/llama", "llama")


@pytest.mark.parametrize(
    ("source", "name"),
    [("runs/a/model", "a"), ("runs/b", "b"), ("org/some-llama", "some-llama")],
)
def test_a_model_is_called_by_its_folder(source, name):
    assert ExistingModel(source, weights="known").name == name
    assert ExistingModel(source, LoRA(4), "known").title == f"from {name}, LoRA of rank 4"


# Refusals


def refused(out: Path, config: TrainConfig, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        train(config, out, cpu=True)
    assert not out.exists()


def test_another_tokenizer_is_refused(folder, tmp_path):
    config = going_on(folder, folder / "llama")
    other = replace(config, text=replace(config.text, tokenization=BPE(300)))
    message = r"other tokens \(300\) than that of .*llama .*; leave the tokenizer out"
    refused(tmp_path / "out", other, message)


def test_more_tokens_than_embeddings_are_refused(folder, tmp_path):
    source = tmp_path / "bare"
    softmax("llama", folder).save_pretrained(source)
    text = replace(tiny(folder).text, tokenization=BPE(300))
    config = tiny(folder, model=ExistingModel(str(source)), text=text)
    refused(
        tmp_path / "out",
        config,
        r"bare has tokens up to 299, the model embeddings for \d+;"
        r" .*resize_token_embeddings\(300\)",
    )


def test_more_tokens_than_positions_are_refused(folder, tmp_path):
    config = going_on(folder, folder / "gpt2", length=65)
    refused(tmp_path / "out", config, "positions for 64 tokens; take a length of 64")


def test_models_that_look_ahead_are_refused(folder, tmp_path):
    FAMILIES["bert"] = {**SIZES, **HEADS}
    try:
        source = save(softmax("bert", folder), tmp_path / "bert", folder)
    finally:
        del FAMILIES["bert"]
    refused(tmp_path / "out", going_on(folder, source), "sees the tokens that it is to")


def test_missing_weights_are_refused(folder, tmp_path):
    source = save(softmax("llama", folder), tmp_path / "llama", folder)
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    config = going_on(folder, source)
    refused(tmp_path / "out", config, "lacks 1 weights of a Llama.*layers.1.self_attn.q")


def test_quantised_weights_are_refused(folder, tmp_path):
    source = save(softmax("llama", folder), tmp_path / "llama", folder)
    config = json.loads((source / "config.json").read_text())
    bits = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": bits}))
    refused(tmp_path / "out", going_on(folder, source), "has quantised weights")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model at .*: it has no config.json"):
        ExistingModel(str(tmp_path))


def test_a_run_without_adapters_leaves_none(folder, tmp_path):
    train(going_on(folder, folder / "own"), tmp_path / "out", cpu=True)
    assert not (tmp_path / "out" / "adapter").exists()
    remove_folder(tmp_path / "out" / "model")
    train(going_on(folder, folder / "own"), tmp_path / "out", cpu=True)
    assert (tmp_path / "out" / "model").exists()
