"""Models of other libraries: ours compute the same, and what cannot be imported says why."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
)

from fastweights import MIXERS, FastWeightsForCausalLM
from fastweights.cli import main
from fastweights.importers import FAMILIES, import_model
from fastweights.importers.plan import ImportPlan, shortest_period
from fastweights.importers.source import FolderSource
from fastweights.layers import TokenContext
from fastweights.recurrence import Decay
from kinds import slow_but
from oracles.transcriptions import TRANSCRIPTIONS
from reference_models import (
    COMMON,
    ORIGINALS,
    RIGHT_FROM,
    VOCABULARY,
    Difference,
    Original,
    difference,
    difference_of_transcription,
    is_right,
    prompt,
    stirred,
)
from tolerances import TOLERANCE

each_precision = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=str
)
pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("unchecked")]


def assert_small(found: Difference, dtype: torch.dtype) -> None:
    assert found.same_tokens
    assert found.prefill <= TOLERANCE[dtype] * found.largest
    assert found.decode <= TOLERANCE[dtype] * found.largest


def test_every_family_is_compared() -> None:
    kinds = {original.kind for original in ORIGINALS.values()}
    assert kinds | {
        transcription.config["model_type"] for transcription in TRANSCRIPTIONS.values()
    } == set(FAMILIES)


FIRST_OF_A_KIND = {one.kind: name for name, one in reversed(ORIGINALS.items())}.values()
"""Variants with biases, experts or other norms are slow tests."""


def original(name: str) -> object:
    """`name`, skipped where this transformers' own model is not the one to agree with."""
    reason = f"transformers' own {name} is right from {RIGHT_FROM.get(name)}"
    marks = [pytest.mark.skipif(not is_right(name), reason=reason)]
    if name not in FIRST_OF_A_KIND:
        marks.append(pytest.mark.slow)
    return pytest.param(name, marks=marks)


@each_precision
@pytest.mark.parametrize("name", [original(name) for name in ORIGINALS])
def test_agrees_with_the_original(name: str, dtype: torch.dtype) -> None:
    assert_small(difference(ORIGINALS[name], dtype), dtype)


@each_precision
@pytest.mark.parametrize("name", TRANSCRIPTIONS)
def test_agrees_with_the_published_forward_pass(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert_small(difference_of_transcription(name, dtype, tmp_path / "model"), dtype)


IN_SHARDS = ("Llama", "Qwen3.5, experts", "Kimi Linear, experts", "Bamba", "RWKV-4", "Zamba2")


@pytest.mark.parametrize("name", slow_but(ORIGINALS, IN_SHARDS))
def test_a_folder_of_shards_is_as_good_as_the_model(name: str, tmp_path: Path) -> None:
    model = ORIGINALS[name].build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = import_model(model).state_dict()
    imported = import_model(tmp_path)
    imported.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for found in (imported.state_dict(), loaded.state_dict()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


EYES = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2}
SIGHT = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4}


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5, experts", "Gemma 3"])
@pytest.mark.parametrize("tied", [False, True])
def test_of_a_model_with_eyes_the_model_of_text_is_read(
    name: str, tied: bool, tmp_path: Path
) -> None:
    text = ORIGINALS[name]
    settings = {**COMMON, **text.settings, "final_logit_softcapping": None}  # theirs leaves it out
    torch.manual_seed(0)
    whole = CONFIG_MAPPING[text.kind.removesuffix("_text")](
        text_config=settings,
        vision_config={**EYES, **SIGHT, "out_hidden_size": text.settings["hidden_size"]},
        tie_word_embeddings=tied,
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
    )
    whole.text_config._experts_implementation = "eager"
    model = stirred(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(whole)](whole).eval())
    model.save_pretrained(tmp_path)
    ids = prompt() % (VOCABULARY - 4)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        for source in (model, tmp_path):
            ours = import_model(source)
            assert ours.config.tie_word_embeddings is tied
            off = (ours(ids, use_cache=False).logits - wanted).abs().max()
            assert off <= TOLERANCE[torch.float32] * wanted.abs().max()


def test_the_imported_model_shares_no_memory_with_the_original() -> None:
    model = ORIGINALS["Llama"].build()
    ours = import_model(model)
    before = ours(prompt()).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(ours(prompt()).logits, before)


# how it is read -----------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    ORIGINALS["Llama"].build().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_fields(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_one_tensor_of_the_old_model_at_a_time(llama: Path) -> None:
    class Watched(FolderSource):
        alive: list[weakref.ref[Tensor]] = []  # noqa: RUF012

        def read(self, name: str) -> Tensor:
            assert not any(ref() is not None for ref in self.alive)
            tensor = super().read(name)
            self.alive.append(weakref.ref(tensor))
            return tensor

    source = Watched(llama)
    plan: ImportPlan = FAMILIES["llama"](source)
    assert len(plan.build_model(source).state_dict()) + 1 == len(source.alive)


def test_layers_are_stated_once_where_they_repeat() -> None:
    assert shortest_period("aaaa") == ["a"]
    assert shortest_period("aabaabaa") == ["a", "a", "b"]
    assert shortest_period("aab") == ["a", "a", "b"]
    assert len(import_model(ORIGINALS["Qwen3"].build()).config.mixers) == 1


def test_progress_counts_tensors(llama: Path) -> None:
    told: list[tuple[int, int]] = []
    model = import_model(llama, watch=lambda done, of: told.append((done, of)))
    of = len(model.state_dict())
    assert told == [(done, of) for done in range(of + 1)]


def test_weights_keep_their_dtype_or_take_another(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    assert {p.dtype for p in import_model(llama).parameters()} == {torch.float16}
    model = import_model(llama, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16


def test_ends_of_text_come_from_the_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"eos_token_id": [3, 5], "temperature": 0.3}')
    assert import_model(llama).generation_config.eos_token_id == [3, 5]


def test_buffers_of_old_checkpoints_are_passed_over(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(llama, lambda tensors: tensors.update({name: torch.ones(4)}))
    import_model(llama)


def test_a_tied_head_may_be_stored(tmp_path: Path) -> None:
    ORIGINALS["Llama 3.1"].build().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 32)}))
    model = import_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("stated", [True, False])
def test_metala_is_tied_if_it_says_so_or_has_no_head(stated: bool, tmp_path: Path) -> None:
    folder = tmp_path / "metala"
    TRANSCRIPTIONS["MetaLA (BICLab)"].save(folder, torch.float32)
    if stated:
        set_fields(folder, tie_word_embeddings=True)
    else:
        rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert import_model(folder).config.tie_word_embeddings


def test_the_published_metala_rounds_its_key() -> None:
    """α and 1 - α in bfloat16, as they were in training, whose keys take few values."""
    torch.manual_seed(0)
    mixer = MIXERS["metala"](32, heads=2, rounded=True).to(torch.bfloat16)
    x = torch.randn(1, 50, 32).bfloat16()
    rule, _ = mixer.project(x, TokenContext.start(x))
    assert isinstance(rule, Decay)
    a = mixer.W_alpha(F.silu(mixer.conv(x, TokenContext.start(x))))
    k = 1 - torch.exp(F.logsigmoid(a) / 16)
    assert k.dtype == torch.bfloat16
    assert torch.equal(rule.key.flatten(-2), k)
    assert len(rule.key.unique()) < 100


# what cannot be imported --------------------------------------------------------------------------


def refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_model(model)


def test_missing_left_over_and_misshapen_tensors_are_named(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.pop("model.norm.weight"))
    refused(llama, "this llama checkpoint lacks model.norm.weight$")
    rewrite(llama, lambda tensors: tensors.update({"model.norm.weights": torch.ones(32)}))
    refused(llama, "lacks model.norm.weight and holds model.norm.weights, which no llama model has")
    rewrite(
        llama,
        lambda tensors: tensors.update(
            {"model.norm.weight": tensors.pop("model.norm.weights")[:7]}
        ),
    )
    refused(llama, r"model.norm.weight .* has shape \[7\], .* calls for \[32\]")
    rewrite(llama, dict.clear)
    refused(llama, "lacks lm_head.weight, .* and 26 more")


def test_files_that_are_missing_or_damaged_are_named(llama: Path, tmp_path: Path) -> None:
    ORIGINALS["Llama"].build().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path / "shards", f"{shard.name} is missing or damaged")
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(llama, "model.safetensors is missing or damaged")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    refused(llama, "holds no model.safetensors; pytorch_model.bin is a pickle, which can run code")
    (llama / "config.json").write_text("{")
    refused(llama, "config.json is missing or damaged")
    refused(
        tmp_path / "nowhere" / "at" / "all",
        "neither a folder nor the name of a model on the Hugging Face hub",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bert"}, "no importer for model_type 'bert'; there are .*llama, .*mamba"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type = 'yarn'",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config = .* cannot be imported",
        ),
        ({"num_attention_heads": 3}, "not a multiple"),
    ],
)
def test_settings_that_ours_cannot_state_are_named(
    llama: Path, fields: dict[str, Any], message: str
) -> None:
    set_fields(llama, **fields)
    with pytest.raises(ValueError, match=message):
        import_model(llama)


def test_residual_scales_of_minimax_that_differ_are_refused() -> None:
    original = ORIGINALS["MiniMax"]
    model = Original("minimax", {**original.settings, "full_attn_alpha_factor": 2.0}).build()
    refused(model, "full_attn_alpha_factor = 2.0 cannot be imported, only with 1.7")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False cannot be imported"),
        ({"n_mamba_heads": 4}, "n_mamba_heads = 4 cannot be imported, only with divisors of mamba"),
        ({"attention_hidden_size": 60}, "attention_hidden_size = 60 cannot be imported"),
    ],
)
def test_what_zamba_shares_or_divides_otherwise_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    refused(Original("zamba", {**ORIGINALS["Zamba"].settings, **fields}).build(), message)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "metala"
    TRANSCRIPTIONS["MetaLA (BICLab)"].save(folder, torch.float32)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["glu_dim"]
    path.write_text(json.dumps(fields))
    refused(folder, "config.json of this metala checkpoint lacks 'glu_dim'")


def test_an_rwkv_model_that_has_rescaled_itself_is_refused() -> None:
    model = ORIGINALS["RWKV-4"].build()
    model(prompt())
    refused(model, "this RWKV model has run")


# the command --------------------------------------------------------------------------------------


def test_the_command_writes_a_whole_folder_or_none(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (llama / "tokenizer.json").write_text("{}")
    out = tmp_path / "ours"

    def killed(_: FastWeightsForCausalLM, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FastWeightsForCausalLM, "save_pretrained", killed)
        assert main(["import", str(llama), "--out", str(out)]) == 130
    assert not out.exists()
    assert main(["import", str(llama), "--out", str(out), "--dtype", "bfloat16"]) == 0
    expected = import_model(llama, torch.bfloat16).state_dict()
    assert (
        capsys.readouterr().out
        == f"{sum(t.numel() for t in expected.values()):,} parameters in {out}\n"
    )
    assert {path.name for path in out.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "modeling_fastweights.py",
        "tokenizer.json",
    }
    assert not list(tmp_path.glob(".*.partial"))
    loaded = FastWeightsForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())

    assert main(["import", str(llama), "--out", str(out)]) == 2
    assert "exists; remove it or write elsewhere" in capsys.readouterr().err
    shutil.rmtree(out)
    set_fields(llama, model_type="bert")
    assert main(["import", str(llama), "--out", str(out)]) == 2
    assert "no importer for model_type 'bert'" in capsys.readouterr().err
    assert not out.exists()
