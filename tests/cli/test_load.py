"""Damaged folders of models: one sentence that names the file, whatever the reader of it raises."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastweights.cli import load, main
from fastweights.cli.load import load_model
from fastweights.errors import CheckpointError
from fastweights.models import FewBitsConfig
from fastweights.training.data.tokenizers import Bytes
from fastweights.training.language.perplexity import PositionLoss
from fastweights.training.loop.checkpoint import save_model
from pretrained import linear_llama
from tiny import tiny

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    save_model(tiny("metala", torch.float32, vocab_size=256), Bytes().build(()), folder)
    return folder


def with_fields(file: str, **fields: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **fields}))

    return damage


def with_text(file: str, text: str) -> Damage:
    return lambda folder: (folder / file).write_text(text) and None


def with_nan(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).flatten()[0] = torch.nan
    save_file(tensors, path, {"format": "pt"})


def without_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path, {"format": "pt"})


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


DAMAGE: dict[str, tuple[Damage, str]] = {
    "config list": (with_text("config.json", "[]"), "config.json"),
    "config null": (with_text("config.json", "null"), "config.json"),
    "config torn": (with_text("config.json", "{"), "config.json"),
    "width": (with_fields("config.json", hidden_size=32), "not of the shapes that config.json"),
    "vocabulary": (with_fields("config.json", vocab_size=512), "not of the shapes"),
    "vocabulary text": (
        with_fields("config.json", vocab_size="256"),
        "Field 'vocab_size' expected int, got str",
    ),
    "layers": (with_fields("config.json", num_hidden_layers=10**9), "memory; make it smaller"),
    "huge width": (with_fields("config.json", hidden_size=10**9), "larger than any can be"),
    "more layers": (with_fields("config.json", num_hidden_layers=3), "the weights lack"),
    "mixers text": (with_fields("config.json", mixers="metala"), "Field 'mixers' expected a list"),
    "other mixer": (with_fields("config.json", mixers=[{"name": "gla"}]), "config.json"),
    "mixer argument": (
        with_fields("config.json", mixers=[{"name": "metala", "heads": "two"}]),
        "heads = 'two'; for metala it must be a whole number",
    ),
    "eps nan": (with_fields("config.json", norm_eps=float("nan")), "norm_eps = nan"),
    "eps text": (with_fields("config.json", norm_eps="1"), "Field 'norm_eps' with value '1'"),
    "dtype": (with_fields("config.json", dtype="zz"), "config.json"),
    "weights nan": (with_nan, "infinite or not a number, among them "),
    "weights torn": (cut_short, "model"),
    "weights missing": (without_weight, "the weights lack 1 "),
    "tokenizer": (with_text("tokenizer.json", '{"a": 1}'), "tokenizer"),
    "tokenizer torn": (with_text("tokenizer.json", "{"), "tokenizer"),
    "end of text": (
        with_fields("generation_config.json", eos_token_id="x"),
        "generation_config.json: eos_token_id = 'x'; it must be a number",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_in_one_sentence(name, sound, tmp_path, capfd):
    damage, words = DAMAGE[name]
    folder = shutil.copytree(sound, tmp_path / "model")
    damage(folder)
    assert main(["generate", str(folder), "--tokens", "2", "--device", "cpu"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("fastweights: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert str(folder) in said.err
    assert "--debug" not in said.err


def test_a_sound_folder_is_loaded(sound):
    model, tokenizer = load_model(sound, torch.device("cpu"))
    assert not model.training
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_python_gets_the_cause(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "model")
    with_text("config.json", "null")(folder)
    with pytest.raises(CheckpointError, match=r"config.json cannot be used"):
        load_model(folder, torch.device("cpu"))


@pytest.fixture
def linearized(tmp_path) -> Path:
    save_model(linear_llama(dtype=torch.float32, vocab_size=258), Bytes().build(()), tmp_path / "l")
    return tmp_path / "l"


@pytest.mark.parametrize(("option", "bits"), [("--int8", 8), ("--int4", 4)])
def test_rounding_is_asked_for_where_models_write(
    option, bits, sound, linearized, monkeypatch, capsys
):
    asked = []
    monkeypatch.setattr(
        load, "FewBitsConfig", lambda bits: asked.append(bits) or FewBitsConfig(bits)
    )
    options = ["--tokens", "2", "--device", "cpu"]
    for words in (["generate", sound], ["linearize", "generate", linearized, "a prompt"]):
        command = [*map(str, words), *options]
        assert main(command) == 0
        assert asked == []
        assert main([*command, option]) == 0
        assert asked == [bits]
        asked.clear()
    assert capsys.readouterr().out.count("a prompt") == 2


def test_two_ways_of_rounding_are_refused(sound, capsys):
    words = ["--prompt", "a", "--tokens", "2", "--int8", "--int4"]
    assert main(["generate", str(sound), *words]) == 2
    assert "--int8 and --int4 both say how weights are rounded" in capsys.readouterr().err


def test_int8_is_what_is_measured(sound, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("What is lost by rounding can be seen in the loss. " * 4)

    def loss(*options: str) -> float:
        out = tmp_path / "-".join(("out", *options))
        words = ["--text", str(text), "--length", "32", "--out", str(out), "--device", "cpu"]
        assert main(["eval", "perplexity", str(sound), *words, *options]) == 0
        (path,) = out.glob("*.json")
        return PositionLoss.load(path).mean

    exact, rounded = loss(), loss("--int8")
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=1e-2)
