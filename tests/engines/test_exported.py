"""Models as programs, as far as no other package is needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fastweights import MIXERS
from fastweights.cli import main
from fastweights.cli.parsers.export import DOMAINS as NAMED
from fastweights.engines.exported.program import Program
from fastweights.engines.exported.states import StateLayout, tensors_of
from fastweights.engines.onnx import DOMAINS, ExportError, write_onnx
from fastweights.models import FastWeightsCache
from kinds import one_of_each
from tiny import tiny, tokens


@pytest.mark.parametrize("name", one_of_each(MIXERS))
def test_zeros_are_the_empty_state(name: str) -> None:
    model = tiny(name, torch.float32, num_hidden_layers=1)
    program, ids = Program(model), tokens(2, 5)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        logits, *past = program(ids[:, :3], *program.layout.empty(batch=2))
        after, *_ = program(ids[:, 3:], *past)
    torch.testing.assert_close(torch.cat([logits, after], 1), wanted, rtol=1e-4, atol=1e-4)


def test_states_are_said_by_what_they_are() -> None:
    layout = StateLayout(tiny("hybrid"))
    assert [state.meaning for state in layout.tensors] == [
        "position",
        "mixer 0, memory 0",
        "mixer 0, inputs of conv",
        "mixer 1, memory 0",
        "mixer 1, memory 1",
        "mixer 1, memory 2",
        "mixer 2, memory 0",
        *(f"mixer 2, inputs of conv_{stream}" for stream in "qkv"),
    ]
    growing = [state.growing for state in layout.tensors if "mixer 1" in state.meaning]
    assert growing == [2, 2, 1]
    assert [len(state) for state in layout.empty(3)] == [3] * len(layout.tensors)


def test_states_go_there_and_back() -> None:
    model, cache = tiny("hybrid"), FastWeightsCache()
    layout = StateLayout(model)
    model(input_ids=tokens(2, 5), past_key_values=cache, use_cache=True)
    there = tensors_of(cache.states)
    for one, other in zip(there, tensors_of(layout.states(there)), strict=True):
        assert one is other


def test_shared_blocks_have_states_of_their_own() -> None:
    shared = [{"layers": [0, 2], "width": 12, "heads": 2}]
    model = tiny("linear", torch.float32, mlp=None, num_hidden_layers=3, shared_blocks=shared)
    program, ids = Program(model), tokens(2, 5)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        _, *past = program(ids[:, :3], *program.layout.empty(batch=2))
        after, *_ = program(ids[:, 3:], *past)
    torch.testing.assert_close(after, wanted[:, 3:], rtol=1e-4, atol=1e-4)


def test_what_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Linear is not exported; pass a FastWeightsForCausalLM"):
        Program(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before"):
        Program(tiny().train())
    if find_spec("onnxscript") is None:
        with pytest.raises(ImportError, match=r"pip install 'fastweights\[onnx\]'"):
            write_onnx(tiny(), tmp_path / "model.onnx", DOMAINS["com.microsoft"])


def test_complex_states_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.engines.onnx.write.require_onnx", lambda: None)
    with pytest.raises(ExportError, match="complex numbers, of which"):
        write_onnx(tiny("lru"), tmp_path / "model.onnx", DOMAINS["com.microsoft"])
    tiny("lru").save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "new" / "a.onnx")]) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_says_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(NAMED) == set(DOMAINS)
    tiny().save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model")]
    assert main([*command, str(tmp_path / "a.onnx"), "--family", "llama"]) != 0
    assert "leave one of them out" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "theirs"), "--domain", "ai.onnx"]) != 0
    assert "--domain is of ONNX graphs" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
