"""What a run says of its result: the model card, the page, and nothing misleading on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load

from conversions import conversion, write_source
from families import teacher
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.linearize.distill.adapt import LoRA, prepare_adaptation
from fastweights.linearize.evaluate.card import model_card
from fastweights.linearize.evaluate.generation import GenerationRow, short_bench
from fastweights.linearize.evaluate.judgement import (
    memory_section,
    recall_section,
    samples_section,
    share_in_words,
    share_section,
)
from fastweights.render.html import text_table, visible
from fastweights.training.loop.folder import create_run
from pretrained import linear_llama

MODES = ("softmax", "linear", "window only", "linear only")


def shares(value: float | None, low: float | None = 0.5, high: float | None = 0.7) -> dict:
    return {
        "share": value,
        "interval": None if value is None else [low, high],
        "window_loses": 0.3,
        "standard_error": 0.02,
        "undefined": "the window alone loses too little" if value is None else None,
    }


def recalled(distance: int, linear: float, share: float | None) -> dict:
    accuracy = dict(zip(MODES, (0.96, linear, 0.125, 0.0625), strict=True))
    rows = {name: {"accuracy": a, "nats_per_token": 1 - a} for name, a in accuracy.items()}
    sizes = {"distance": distance, "tokens": 896, "beyond_training": distance > 64}
    return {**sizes, **rows, **shares(share)}


def evaluation(share: float | None = 0.6) -> dict[str, Any]:
    nats = dict(zip(MODES, (3.0, 3.12, 3.3, 4.0), strict=True))
    rows = {
        name: {"perplexity": 2.7**n, "nats_per_token": n, "kl": n - 3, "agreement": 0.8}
        for name, n in nats.items()
    }
    return {
        **rows,
        "share": share,
        "share_details": shares(share),
        "share_by_position": [
            {"from": 1, "to": 1, **shares(None)},
            {"from": 2, "to": 3, **shares(2)},
        ],
        "recall": [recalled(64, 0.95, share), recalled(128, 0.25, None)],
        "recall_left_out": {"256": "the model has 250 positions, and this takes 288"},
        "memory": [{"tokens": 128, "softmax": 24_576, "linear": 8_944}],
        "break_even": 17,
        "samples": [
            {"prompt": "<b>\x07", "drawn": False, "softmax": "a\nb", "linear": "é"},
            {"prompt": "c", "drawn": True, "softmax": "d", "linear": "e"},
        ],
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The numbers of a run, whose base model states a licence."""
    source, out = write_source(tmp_path / "Tiny"), tmp_path / "run"
    (source / "model" / "README.md").write_text(
        "---\nlicense: other\nlicense_name: tiny\nlanguage: de\ntags:\n- old\n---\n# Tiny\n"
    )
    create_run(out, conversion(source, seed=5))
    plan = {"model_type": "llama", "parameters": 1234, "left": [[3, "a sliding window"]]}
    plan["converted"] = [{"layer": layer} for layer in range(3)]
    (out / "plan.json").write_text(json.dumps(plan))
    (out / "evaluation.json").write_text(json.dumps(evaluation()))
    return out


def written(run: Path, tmp_path: Path) -> tuple[dict, str]:
    path = tmp_path / "README.md"
    path.write_text(model_card(run, "linearized_llama", [0, 2]))
    return metadata_load(path) or {}, path.read_text()


def test_the_card_has_what_the_hub_reads(run: Path, tmp_path: Path) -> None:
    metadata, _ = written(run, tmp_path)
    assert metadata == {
        "base_model": "Tiny",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "tiny",
        "language": "de",
        "tags": ["linearized", "linear-attention", "fastweights", "linearized_llama"],
    }
    (tmp_path / "Tiny" / "model" / "README.md").unlink()
    assert written(run, tmp_path)[0].keys() == metadata.keys() - {
        "license",
        "license_name",
        "language",
    }


def test_the_card_says_what_was_measured(run: Path, tmp_path: Path) -> None:
    _, card = written(run, tmp_path)
    said = (
        "linear attention in layers 0, 2, softmax attention in layers 1, 3.",
        "AutoModelForCausalLM.from_pretrained",
        "| this model | 22.17 | 3.1200 | 0.1200 | 80.0% |",
        "The linear side closes 60.0% (50.0% … 70.0%).",
        "| 64 | 96.0% | 95.0% | 12.5% | 60.0% (50.0% … 70.0%) |",
        "| 128* | 96.0% | 25.0% | 12.5% | undefined |",
        "- Recall from 128 tokens back: 25.0% of the tokens, where softmax has 96.0%.",
        "- Recall beyond 128 tokens was not measured.",
        "- It was trained on sequences of 24 tokens.",
        "- Below 17 tokens its linear layers take more memory",
        "| 128 | 24.58 kB | 8.944 kB |",
        "features hedgehog, window 4",
        "4 steps, 192 tokens in sequences of 24; AdamW at 0.01",
        "| text | text.txt; seed 5 |",
        f"torch {torch.__version__}"[:10],
    )
    assert [line for line in said if line not in card] == []
    assert "Recall from 64 tokens back" not in card
    assert str(tmp_path) not in card
    assert model_card(run, "linearized_llama", [0, 2]) == card


def test_an_undefined_share_is_said_with_its_reason(run: Path, tmp_path: Path) -> None:
    (run / "evaluation.json").write_text(json.dumps(evaluation(None)))
    why = "The share is undefined: the window alone loses too little."
    assert why in written(run, tmp_path)[1]
    assert share_in_words(evaluation(None)) == why
    assert why in share_section(evaluation(None), tmp_path)


@pytest.mark.usefixtures("pictures")
def test_the_page_shows_the_judgement(tmp_path: Path) -> None:
    found = evaluation()
    page = share_section(found, tmp_path) + recall_section(found) + samples_section(found)
    assert (tmp_path / "share.png").read_bytes().startswith(b"\x89PNG")
    cells = ("60.0% (50.0% … 70.0%)", "2 … 3", "undefined", "25.0%", "longer than training")
    escaped = ("&lt;b&gt;\\x07", "a\nb", "é", "drawn", "likeliest")
    assert [cell for cell in (*cells, *escaped) if f"<td>{cell}</td>" not in page] == []
    assert "Distance 256: not measured, the model has 250 positions, and this takes 288." in page
    speed = [
        GenerationRow(name, 1, 64, 20, 0.1, 2.0, 1 / rate, 0)
        for name, rate in (("linear", 125.0), ("softmax", 250.0))
    ]
    memory = memory_section(found, speed)
    assert "<td class='n'>64</td><td class='n'>125</td><td class='n'>250</td>" in memory
    assert "From 17 tokens on" in memory


def test_shares_without_a_bound_or_out_of_the_picture_are_drawn(tmp_path: Path) -> None:
    found = evaluation()
    found["share_by_position"] = [{"from": 1, "to": 1, **shares(-30.0, None, 40.0)}]
    found["recall"] = []
    assert "-3000.0% (−∞ … 4000.0%)" in share_section(found, tmp_path)


def test_what_cannot_be_printed_is_escaped() -> None:
    text = "".join(map(chr, range(0x2FF))) + "\u2028\U0001f411"
    shown = visible(text)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert shown.startswith(r"\x00\x01\x02\x03\x04\x05\x06\x07\x08\t" + "\n" + r"\x0b")
    assert shown.endswith(r"\u2028" + "\U0001f411")
    assert escape(shown) in text_table([{"text": text}])


def test_speed_is_that_of_the_model_without_adapters() -> None:
    model = prepare_adaptation(linear_llama(dtype=torch.float32), LoRA())
    rows = short_bench(model, 100)
    assert [(row.contender, row.prompt, row.tokens) for row in rows] == [
        ("linear", 64, 20),
        ("softmax", 64, 20),
    ]
    assert all(row.last > 0 for row in rows)
    assert short_bench(model, 83) == []


def test_adapters_of_transposed_weights_come_without_a_warning() -> None:
    model = linearize(teacher("gpt2"), LinearAttentionConfig(window=4))
    assert prepare_adaptation(model, LoRA()).peft_config["default"].fan_in_fan_out


@pytest.mark.slow
def test_a_whole_run_says_nothing_on_stderr(tmp_path: Path) -> None:
    """Warnings of transformers and peft go there, and progress does not."""
    source = write_source(tmp_path)
    command = [sys.executable, "-m", "fastweights.cli", "linearize", str(source / "model")]
    options = {
        "--data": source / "text.txt",
        "--out": tmp_path / "run",
        "--length": 24,
        "--window": 4,
        "--batch": 2,
        "--transfer-steps": 1,
        "--finetune-steps": 1,
        "--softmax-layers": 1,
        "--validation-tokens": 94,
        "--device": "cpu",
    }
    given = [str(part) for option in options.items() for part in option]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    card = tmp_path / "run" / "model" / "README.md"
    assert (metadata_load(card) or {})["tags"][-1] == "linearized_llama"
