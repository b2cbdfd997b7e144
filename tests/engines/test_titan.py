"""What of the engine for torchtitan needs no torchtitan."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path, PosixPath

import pytest
import torch
from torch.distributed.checkpoint import save
from torch.utils.flop_counter import FlopCounterMode

from fastweights import PRESETS, FastWeightsForCausalLM
from fastweights.engines.titan.export import IndexUnpickler, export
from fastweights.engines.titan.names import (
    PREFIX,
    find_config,
    flavours,
    from_folder_names,
    to_folder_names,
)
from fastweights.engines.titan.operations import training_operations
from fastweights.errors import CheckpointError
from fastweights.training.data.tokenizers import Bytes
from fastweights.training.loop.checkpoint import save_model
from tiny import HYBRID, tiny, tiny_config


def test_flavours_are_the_language_models_among_the_presets() -> None:
    assert {"metala-360m", "mesanet-440m", "mesanet-940m-gated-deltanet"} <= set(flavours())
    for name in flavours():
        assert PRESETS[name].model is FastWeightsForCausalLM
        assert find_config(name).to_dict() == PRESETS[name].config().to_dict()


def test_a_folder_is_a_flavour(tmp_path: Path) -> None:
    tiny("hybrid").save_pretrained(tmp_path / "model")
    for folder in (tmp_path, tmp_path / "model"):
        assert find_config(str(folder)).mixers == HYBRID


@pytest.mark.parametrize(
    ("flavour", "message"),
    [
        ("metala-2b", "there is no preset 'metala-2b'; did you mean metala-"),
        ("metala-lra-image", "is a classifier, and torchtitan trains language models"),
    ],
)
def test_other_flavours_are_refused(flavour: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_config(flavour)


@pytest.mark.parametrize("tied", [False, True])
def test_names_go_there_and_back(tied: bool) -> None:
    model = tiny("hybrid", tie_word_embeddings=tied)
    inside = {PREFIX + name: weight for name, weight in model.state_dict().items()}
    folder = to_folder_names({**inside, "optimizer.lr": torch.zeros(1)}, tied=tied)
    stored = set(dict(model.named_parameters()))
    assert set(folder) == stored
    back = from_folder_names(folder, tied=tied)
    assert back.keys() == inside.keys()
    assert all(torch.equal(back[name], weight) for name, weight in inside.items())


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"learnt_positions": 64}])
def test_operations_of_a_softmax_model_are_counted_as_they_happen(fields: dict) -> None:
    tokens, width = 64, 64
    config = tiny_config("softmax", hidden_size=width, **fields)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    whole_scores = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, whole_scores:
        FastWeightsForCausalLM(config)(input_ids=ids).logits.sum().backward()
    masked = config.num_hidden_layers * 3 * 4 * width * tokens // 2
    counted = counter.get_total_flops() / tokens - masked
    assert training_operations(config, tokens) == pytest.approx(counted, rel=0.02)


def test_operations_of_a_long_sequence_grow_by_softmax_alone() -> None:
    short, long = (
        {name: training_operations(tiny_config(name), t) for name in ("softmax", "gla", "mesa")}
        for t in (1024, 4096)
    )
    assert long["softmax"] > 2 * short["softmax"]
    assert long["gla"] == pytest.approx(short["gla"], rel=0.02)
    assert long["mesa"] == pytest.approx(short["mesa"], rel=0.02)


def _checkpoint(folder: Path, **fields: object) -> tuple[Path, Path]:
    """A checkpoint as torchtitan writes it, and a folder of the same configuration."""
    words = Bytes().build([])
    model = tiny("hybrid", torch.float32, vocab_size=len(words), **fields)
    save_model(model, words, folder / "model")
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    weights = {PREFIX + name: weight for name, weight in model.state_dict().items()}
    save({**weights, "train_state.step": 3}, checkpoint_id=folder / "step-3", no_dist=True)
    return folder / "step-3", folder / "model"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_becomes_a_folder(tmp_path: Path, tied: bool) -> None:
    step, model = _checkpoint(tmp_path, tie_word_embeddings=tied)
    export(step, str(model), model, tmp_path / "out")
    before, after = (
        FastWeightsForCausalLM.from_pretrained(path).state_dict()
        for path in (model, tmp_path / "out")
    )
    assert all(torch.equal(after[name], weight + 1) for name, weight in before.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(ValueError, match="exists already"):
        export(step, str(model), model, tmp_path / "out")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_as_any_python_writes_them(module: str) -> None:
    index = io.BytesIO(f"c{module}\nPosixPath\n.".encode())
    assert IndexUnpickler(index).load() is PosixPath


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    step, model = _checkpoint(tmp_path)
    words = Bytes().build([])
    for others, message in (
        ({"hidden_size": 32}, r"embed_tokens.weight has shape \[258, 32\], and there it has"),
        ({"num_hidden_layers": 4}, "layers.3.mixer_norm.weight has shape .* there is none"),
        ({"tie_word_embeddings": True}, "has a head of its own"),
    ):
        save_model(tiny("hybrid", vocab_size=len(words), **others), words, tmp_path / "other")
        with pytest.raises(CheckpointError, match=message):
            export(step, str(tmp_path / "other"), model, tmp_path / "out")
        shutil.rmtree(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is no checkpoint of torchtitan"):
        export(tmp_path, str(model), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Harm:
    def __reduce__(self) -> tuple:
        return print, ("harm",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (pickle.dumps(_Harm()), "names builtins.print"),
        (b"\x80\x04", "is damaged"),
        (b"", "is damaged"),
        (b"not a pickle", "is damaged"),
        (pickle.dumps(3), "is damaged"),
    ],
)
def test_an_index_that_is_none_is_refused(
    tmp_path: Path, index: bytes, message: str, capsys: pytest.CaptureFixture
) -> None:
    step, model = _checkpoint(tmp_path)
    (step / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match=message):
        export(step, str(model), model, tmp_path / "out")
    assert "harm" not in capsys.readouterr().out
