"""Models of ours as transformers': they load there and compute the same, or a difference is
named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from fastweights import FastWeightsForCausalLM
from fastweights.cli import main
from fastweights.importers import FAMILIES, SETTINGS, export_model, import_model
from kinds import slow_but
from reference_models import ORIGINALS, VOCABULARY, is_right, prompt, stirred
from tiny import tiny
from tolerances import TOLERANCE

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("unchecked")]
ONE_WAY = "RWKV-4"
"""The norm of its embeddings is applied to them, and no embeddings of ours are normalised."""


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    model.config._experts_implementation = "eager"  # its kernels want widths that are multiples
    return model.eval()(prompt(), use_cache=False).logits


def assert_same(theirs: PreTrainedModel, ours: FastWeightsForCausalLM) -> None:
    wanted = logits(ours)
    difference = (logits(theirs) - wanted).abs().max()
    assert difference <= TOLERANCE[wanted.dtype] * wanted.abs().max()


FIRST_OF_A_KIND = {one.kind: name for name, one in reversed(ORIGINALS.items())}.values()
BOTH_WAYS = [name for name in ORIGINALS if name != ONE_WAY and is_right(name)]


@pytest.mark.parametrize("name", slow_but(BOTH_WAYS, FIRST_OF_A_KIND))
def test_it_loads_in_transformers_and_computes_the_same(name: str, tmp_path: Path) -> None:
    ours = import_model(ORIGINALS[name].build())
    export_model(ours, ORIGINALS[name].kind).save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), ours)
    again = import_model(tmp_path).state_dict()
    for key, tensor in ours.state_dict().items():
        assert torch.allclose(again[key], tensor, rtol=1e-6, atol=1e-6), key


def test_every_family_of_transformers_but_one_is_written() -> None:
    kinds = {original.kind for original in ORIGINALS.values()}
    assert set(SETTINGS) == kinds - {ORIGINALS[ONE_WAY].kind}
    assert set(SETTINGS) < set(FAMILIES)


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("softmax", {}),
    "qwen3": ("softmax", {"mixers": [{"name": "softmax", "qk_norm": 1e-5, "width": 6}]}),
    "mistral": ("softmax", {"mixers": [{"name": "softmax", "window": 5, "kv_heads": 2}]}),
    "mamba": ("mamba", {"mlp": None, "tie_word_embeddings": True}),
    "mamba2": ("mamba2", {"mlp": None}),
    "bamba": (
        "mamba2",
        {"mixers": [{"name": "mamba2"}, {"name": "softmax", "rope": {"fraction": 1.0}}]},
    ),
    "granitemoehybrid": (
        "mamba2",
        {
            "mixers": [{"name": "mamba2"}, {"name": "softmax", "rope": {"fraction": 0.0}}],
            "embedding_scale": 4.0,
        },
    ),
    "lfm2": (
        "softmax",
        {"mixers": [{"name": "shortconv"}, {"name": "softmax", "qk_norm": 1e-5}], "norm_eps": 1e-5},
    ),
    "minimax": (
        "softmax",
        {
            "mixers": [{"name": "lightning"}, {"name": "softmax"}],
            "normalized_residual": True,
            "embedding_scale": 0.3,
        },
    ),
}


@pytest.mark.parametrize("kind", OURS)
def test_a_model_of_our_own_finds_its_family(kind: str) -> None:
    layers, fields = OURS[kind]
    fields = {"vocab_size": VOCABULARY, "embedding_scale": 1.0, **fields}
    ours = tiny(layers, dtype=torch.float32, **fields)
    stirred(ours)
    theirs = export_model(ours)
    assert theirs.config.model_type == kind
    assert_same(theirs, ours)


def test_what_nothing_of_ours_is_in_is_zero() -> None:
    theirs = export_model(import_model(ORIGINALS["MiniMax"].build()))
    gates = [p for name, p in theirs.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == 3
    assert not any(gate.any() for gate in gates)


def test_weights_keep_their_dtype() -> None:
    ours = import_model(ORIGINALS["Bamba"].build(), torch.bfloat16)
    assert {p.dtype for p in export_model(ours).parameters()} == {torch.bfloat16}


# what cannot be written ---------------------------------------------------------------------------


def test_differences_are_named() -> None:
    fields: dict[str, Any] = {"vocab_size": VOCABULARY, "dtype": torch.float32}
    scaled = tiny("softmax", **fields)
    with pytest.raises(ValueError, match=r"cannot be written as 'llama': its input_scale is 4.0"):
        export_model(scaled, "llama")
    with pytest.raises(ValueError, match=r"'mamba2', whose layers are others: no layer has a Mamb"):
        export_model(scaled, "mamba2")
    turned = tiny(
        "softmax",
        mixers=[{"name": "softmax", "rope": {"fraction": 0.5}}],
        embedding_scale=1.0,
        **fields,
    )
    with pytest.raises(ValueError, match=r"its rope of layers.0.mixer is .*fraction=0.5.*1.0"):
        export_model(turned, "llama")
    metala = tiny("metala", embedding_scale=1.0, **fields)
    with pytest.raises(ValueError, match="no family of transformers that is written has such"):
        export_model(metala)
    with pytest.raises(ValueError, match="no model is written as 'bert'; there are bailing_h"):
        export_model(metala, "bert")
    xlstm = import_model(ORIGINALS["xLSTM"].build())
    with torch.no_grad():
        xlstm.model.layers[0].mixer.norm.weight[0] = 2
    with pytest.raises(ValueError, match=r"has no model.layers.0.mixer.norm.weight; ours is not 1"):
        export_model(xlstm, "xlstm")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.disable_progress_bar()
    ours = import_model(ORIGINALS["Llama"].build())
    ours.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    command = ["export", str(tmp_path / "ours"), str(tmp_path / "theirs")]
    assert main(command) == 0
    assert " parameters as llama in " in capsys.readouterr().out
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "theirs" / "tokenizer.json").is_file()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs"), ours)
    assert main(command) == 2
    assert "exists; remove it or write elsewhere" in capsys.readouterr().err
    command = ["export", str(tmp_path / "theirs"), str(tmp_path / "again")]
    assert main(command) == 0  # one of transformers goes through its importer
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), ours)
