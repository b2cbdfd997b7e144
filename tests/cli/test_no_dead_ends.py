"""What each verb writes, every other verb takes, or refuses before it reads weights, with advice
that works.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from chat_templates import CHATML
from fastweights.cli import main
from fastweights.importers import gguf as reader
from fastweights.importers.source import FolderSource
from fastweights.linearize import LinearAttentionConfig, linearize, place_landmarks
from fastweights.training.data.tokenizers import Bytes
from fastweights.training.loop.checkpoint import save_model
from gguf_files import WORDS, write
from pretrained import llama
from tiny import tiny

pytestmark = pytest.mark.sampled

LANDMARKS = LinearAttentionConfig(window=4, sinks=2, features="landmarks", feature_dim=4)
TEXT = " ".join("abcdefghijklmnopqrstuvwxyz" * 40)
CPU = ["--device", "cpu"]
TUNING = ["--steps", "1", "--length", "16", "--batch", "2", "--sample", "0", *CPU]
CONVERSION = ["--length", "16", "--window", "4", "--transfer-steps", "0", "--finetune-steps", "0"]
CONVERSION += ["--validation-tokens", "64", "--until", "convert", *CPU]
READING = ["--text", "TEXT", "--length", "16", "--tokens", "64"]
VERBS: dict[str, list[str]] = {
    "generate": ["generate", "MODEL", "--prompt", "ab", "--tokens", "3"],
    "generate int4": ["generate", "MODEL", "--prompt", "ab", "--tokens", "3", "--int4"],
    "chat": ["chat", "MODEL", "--tokens", "3"],
    "eval perplexity": ["eval", "perplexity", "MODEL", *READING, "--out", "OUT"],
    "eval tasks": ["eval", "tasks", "MODEL", "--data", "OUT", "--tasks", "ITEMS", "--out", "OUT"],
    "analyze": ["analyze", "MODEL", "--text", "TEXT", "--tokens", "8", "--out", "OUT"],
    "check": ["check", "MODEL", "--only", "causal", "--length", "4"],
    "import": ["import", "MODEL", "--out", "OUT"],
    "export": ["export", "MODEL", "OUT"],
    "export onnx": ["export", "MODEL", "OUT.onnx"],
    "export pt2": ["export", "MODEL", "OUT.pt2"],
    "linearize": ["linearize", "MODEL", "--data", "TEXT", *CONVERSION, "--out", "OUT"],
    "linearize plan": ["linearize", "plan", "MODEL"],
    "linearize generate": ["linearize", "generate", "MODEL", "ab", "--tokens", "3"],
    "linearize bench": [
        *("linearize", "bench", "MODEL", "--prompt", "4", "--tokens", "4,8", "--batches", "1"),
        *("--seconds", "0.1", "--out", "OUT.json"),
    ],
    "bench mesa": ["bench", "mesa", "--checkpoint", "MODEL", "--quick", "--out", "OUT.json"],
    "quantize": ["quantize", "MODEL", "OUT", "--int4"],
    "train": ["train", "--from", "MODEL", "--data", "TEXT", *TUNING, "--out", "OUT"],
}
TUNED = {"tuned": "transformers", "adapted": "transformers", "tuned linear": "linearized"}
"""Runs of `train --from`, and what they began with."""
ROUNDED = {"few bits": "transformers", "ours, few bits": "ours", "linear, few bits": "linearized"}
"""What `quantize` writes, and of which."""
OURS, LINEAR = ("ours", "imported"), ("linearized", "tuned linear")
SOFTMAX = ("transformers", "tuned", "adapted", "gguf")
KINDS = (*OURS, *LINEAR, *SOFTMAX, *ROUNDED)


class Refusal(NamedTuple):
    """What is not done, why it says that it is not, and the verbs that it advises instead."""

    verb: str
    kinds: Sequence[str]
    says: str
    advice: Sequence[tuple[str, str]] = ()


REFUSALS = [
    Refusal("import", OURS, "is a model of fastweights already; use it as it is"),
    Refusal("import", LINEAR, "import the softmax model", [("import", "transformers")]),
    Refusal("export", ["ours"], "no family of transformers that is written has such a model"),
    Refusal(
        "export",
        LINEAR,
        "a file that ends in .onnx or .pt2, or export the softmax model",
        [("export", "transformers")],
    ),
    *(
        Refusal(verb, kinds, says, advice)
        for verb in ("linearize", "linearize plan")
        for kinds, says, advice in (
            (
                (*OURS, "ours, few bits"),
                "which `fastweights export` writes of one",
                [("export", "imported")],
            ),
            (
                (*LINEAR, "linear, few bits"),
                "load the model it was made from",
                [("linearize plan", "transformers")],
            ),
        )
    ),
    *(
        Refusal(verb, (*OURS, *SOFTMAX), "not a linearized model; `fastweights generate` continues")
        for verb in ("linearize generate", "linearize bench")
    ),
    *(
        Refusal(verb, tuple(ROUNDED), "of 4 bits; name the model that it was made from")
        for verb in ("import", "export", "export onnx", "export pt2", "quantize")
    ),
    *(
        Refusal(verb, ["few bits"], "of 4 bits; name the model that it was made from")
        for verb in ("linearize", "linearize plan", "analyze")
    ),
    Refusal("train", tuple(ROUNDED), "quantised weights, which are not trained"),
    *(
        Refusal(verb, ["few bits", "ours, few bits"], "not a linearized model")
        for verb in ("linearize generate", "linearize bench")
    ),
    Refusal("bench mesa", KINDS, "no Mesa layer"),
]
REFUSED = {(one.verb, kind): one for one in REFUSALS for kind in one.kinds}
NEEDS = {"export onnx": [pytest.mark.onnx], "export pt2": [pytest.mark.slow]}
"""Marks of verbs that take minutes or more packages, where they do something."""
SECONDS = ("generate int4", "chat", "eval perplexity", "eval tasks", "check", "linearize", "train")
ALIKE = {*product(SECONDS, ("tuned", "tuned linear", "gguf")), ("linearize", "adapted")}
ALIKE |= {*product(SECONDS, ("ours, few bits",))}
"""Pairs that do what another does, and take long together."""


def pairs() -> Iterator[Any]:
    """Every verb with every kind of model."""
    for verb, kind in product(VERBS, KINDS):
        marks = [] if (verb, kind) in REFUSED else [pytest.mark.long, *NEEDS.get(verb, [])]
        marks += [pytest.mark.slow] * ((verb, kind) in ALIKE)
        yield pytest.param(verb, kind, marks=marks, id=f"{verb}, {kind}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The models, a folder each, and a text for them."""
    there, tokenizer = tmp_path_factory.mktemp("models"), Bytes().build(())
    tokenizer.chat_template, size = CHATML, {"vocab_size": len(tokenizer)}
    (there / "text.txt").write_text(TEXT)
    (there / "items.jsonl").write_text(json.dumps({"text": "a b c", "value": "d"}))
    softmax = llama(2, torch.float32, **size)
    save_model(tiny("hybrid", torch.float32, **size), tokenizer, there / "ours")
    save_model(softmax, tokenizer, there / "transformers")
    linear: Any = linearize(softmax, LANDMARKS)
    texts = torch.randint(0, 256, (2, 1, 64), generator=torch.Generator().manual_seed(0))
    place_landmarks(linear, ({"input_ids": ids} for ids in texts), 0)
    save_model(linear, tokenizer, there / "linearized")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader, "HF_HOME", str(there / "hub"))
        yield there


def model(there: Path, kind: str) -> Path:
    """A model of this kind, made when it is needed first."""
    if kind == "gguf":
        pytest.importorskip("gguf")
    found = there / ("tiny.gguf" if kind == "gguf" else kind)
    if found.exists():
        return found
    if kind == "gguf":
        write(llama(2, torch.float32, vocab_size=len(WORDS) + 1), found)
    elif kind in ROUNDED:
        assert main(["quantize", str(model(there, ROUNDED[kind])), str(found), "--int4"]) == 0
    elif kind == "imported":
        assert main(["import", str(there / "transformers"), "--out", str(found)]) == 0
    else:
        lora = ["--lora", "2"] if kind == "adapted" else []
        command = ["train", "--from", str(there / TUNED[kind]), "--data", str(there / "text.txt")]
        assert main([*command, *TUNING, *lora, "--out", str(found)]) == 0
    return found


def run(there: Path, verb: str, kind: str, out: Path) -> int:
    given = {
        "MODEL": model(there, kind),
        "TEXT": there / "text.txt",
        "ITEMS": there / "items.jsonl",
        "OUT": out,
        **{f"OUT{end}": out.with_suffix(end) for end in (".onnx", ".pt2", ".json")},
    }
    return main([str(given.get(word, word)) for word in VERBS[verb]])


def unread(*_: object, **__: object) -> None:
    raise AssertionError("weights were read")


@pytest.mark.parametrize(("verb", "kind"), list(pairs()))
def test_it_works_or_says_before_it_reads_weights_what_does(
    verb, kind, models, tmp_path, monkeypatch, capsys, request
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    model(models, kind)
    if verb in NEEDS:
        request.getfixturevalue("unchecked")
    refusal = REFUSED.get((verb, kind))
    if refusal is None:
        assert run(models, verb, kind, tmp_path / "out") == 0, capsys.readouterr().err
        return
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "from_pretrained", unread)
        patched.setattr(FolderSource, "read", unread)
        assert run(models, verb, kind, tmp_path / "out") == 2
    assert refusal.says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: f"{one.verb}, {one.kinds[0]}")
def test_what_a_refusal_advises_works(refusal, models, tmp_path) -> None:
    for verb, kind in refusal.advice:
        assert run(models, verb, kind, tmp_path / "instead") == 0


def test_one_refused_model_leaves_the_page_of_the_others(models, tmp_path, capsys) -> None:
    (models / "none").mkdir()
    command = ["analyze", *(str(models / name) for name in ("none", "missing", "linearized"))]
    command += ["--tokens", "8", "--text", str(models / "text.txt"), "--out", str(tmp_path)]
    assert main(command) == 2
    assert "linearized" in (tmp_path / "report.html").read_text()
    said = " ".join(capsys.readouterr().err.split())
    assert "not on the page: no model at" in said
    assert "missing': there is no such folder or file" in said
