"""Models as programs of torch.export, compiled ahead of time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.package import package
from transformers import LlamaForCausalLM

from fastweights import MIXERS
from fastweights.cli import main
from fastweights.cli.verbs.export import tell_layers
from fastweights.engines.aoti import export_programs, write_package
from fastweights.engines.aoti.write import require_equal
from fastweights.engines.exported.chunks import LoopedChunks, Step
from fastweights.engines.exported.errors import ExportError
from fastweights.engines.exported.pairs import unguarded
from fastweights.engines.exported.program import DecodingProgram
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.methods import use_method
from fastweights.training.loop.report import Reporter, WorkDone
from kinds import first_of_each, one_of_each
from model_laws import read_in_parts
from pretrained import linear_llama
from tiny import tiny, tokens

TRACED = "mamba2"
"""The mixer that is traced every time: in the others' graphs, the loop is of their chunks."""
NO_COMPILER = config.patch({"cpp.cxx": (None, "no-such-compiler")})


@pytest.mark.parametrize("name", one_of_each(MIXERS))
@torch.no_grad()
def test_chunks_are_the_model(name: str) -> None:
    """Fewer tokens than a chunk, several chunks, and some behind the last of them."""
    model, ids = tiny(name, num_hidden_layers=1), tokens(2, 23)
    wanted = model(input_ids=ids).logits
    program = DecodingProgram(model)
    with use_method(model, LoopedChunks(8)):
        found, _ = read_in_parts(program, ids, [3, 20], program.layout.empty(batch=2))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [TRACED, *(pytest.param(n, marks=pytest.mark.slow) for n in first_of_each(MIXERS))],
)
@pytest.mark.usefixtures("unchecked")
def test_graphs_are_the_model(name: str) -> None:
    model, ids = tiny(name, num_hidden_layers=1), tokens(3, 140)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    programs = {key: unguarded(p) for key, p in export_programs(model).items()}
    for prompt in (138, 2):
        first, *states = programs["prefill"](ids[:, :prompt], *programs["start"](ids))
        rest, _ = read_in_parts(programs["decode"], ids[:, prompt : prompt + 2], [1, 1], states)
        found = torch.cat([first, rest], 1)
        torch.testing.assert_close(found, wanted[:, : prompt + 2], rtol=1e-8, atol=1e-8)


WITHOUT_US = """
import json, sys, torch
from torch._inductor.package import load_package

start, prefill, decode = (load_package(sys.argv[1], n) for n in ("start", "prefill", "decode"))
known = json.loads(prefill.get_metadata()["fastweights"])
assert known == json.loads(decode.get_metadata()["fastweights"])
ids = torch.tensor(json.loads(sys.argv[2]))
kinds = [getattr(torch, dtype) for dtype in known["dtypes"]]
states = start(ids)
assert [list(s.shape) for s in states] == known["shapes"]
assert [s.dtype for s in states] == kinds and not any(s.any() for s in states)
found = []
for program, piece in zip((prefill, decode, decode), ids.split([ids.shape[1] - 2, 1, 1], 1)):
    logits, *states = program(piece, *states)
    found.append(logits)
assert "fastweights" not in sys.modules
print(json.dumps([known["vocab_size"], torch.cat(found, 1).tolist()]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["hybrid", "lru", "kalmanet", "s4"])
def test_packages_are_the_model_without_us(name: str, tmp_path: Path) -> None:
    model, ids = tiny(name, torch.float32), tokens(1, 80)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "model.pt2"
    assert main(["export", str(tmp_path / "model"), str(out)]) == 0
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    for length in (80, 5):
        command = [sys.executable, "-c", WITHOUT_US, str(out), json.dumps(ids[:, :length].tolist())]
        said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        size, found = json.loads(said.stdout)
        assert size == model.config.vocab_size
        torch.testing.assert_close(torch.tensor(found), wanted[:, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake"), reason="programs in C++ are built by cmake")
@pytest.mark.usefixtures("unchecked")
def test_the_program_in_cpp_says_what_the_model_does(tmp_path: Path) -> None:
    model, ids = tiny("hybrid", torch.float32), tokens(1, 5)
    write_package(model, tmp_path / "model.pt2")
    page = (Path(__file__).parents[2] / "docs" / "aot.md").read_text(encoding="utf-8")
    for language, name in (("cpp", "generate.cpp"), ("cmake", "CMakeLists.txt")):
        block = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert block is not None
        (tmp_path / name).write_text(block[1])

    def run(*command: str) -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        return done.stdout

    run("cmake", "-B", "build", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    run("cmake", "--build", "build")
    said = run("build/generate", "model.pt2", *map(str, ids[0].tolist()))
    wanted = model.generate(ids, max_new_tokens=100, do_sample=False)[0, 5:]
    assert [int(token) for token in said.split()] == wanted.tolist()


@pytest.mark.parametrize("factor", [1, 1.001, float("nan")])
def test_another_function_is_refused(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a compiler summed one row of S4 for all of them."""
    model = tiny(dtype=torch.float32)
    program = DecodingProgram(model)

    def load(*_: object) -> Callable[..., tuple[Tensor, ...]]:
        def call(*given: Tensor) -> tuple[Tensor, ...]:
            logits, *states = program(*given)
            return factor * logits, *states

        return call

    monkeypatch.setattr(package, "load_package", load)
    wrong = pytest.raises(ExportError, match="has compiled another model")
    with nullcontext() if factor == 1 else wrong:
        require_equal(model, Path("model.pt2"))


def test_what_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Linear is not exported"):
        export_programs(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before"):
        write_package(tiny().train(), tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"model\.zip does not end in \.pt2"):
        write_package(tiny(), tmp_path / "model.zip")
    (tmp_path / "there.pt2").touch()
    with pytest.raises(ValueError, match=r"there\.pt2 exists; remove it"):
        write_package(tiny(), tmp_path / "there.pt2")
    without = pytest.raises(ValueError, match=r"no C\+\+ compiler.*install g\+\+ or clang")
    with NO_COMPILER, without:
        write_package(tiny(), tmp_path / "model.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["there.pt2"]


@pytest.mark.usefixtures("unchecked")
def test_layers_are_told_as_they_are_traced() -> None:
    told: list[tuple[int, int]] = []

    class Listens(Reporter):
        def phase(self, phase: WorkDone) -> None:
            told.append((phase.done, phase.total))

    model = tiny("linear", num_hidden_layers=2)
    program = DecodingProgram(model)
    with tell_layers(model, Listens()):
        model(input_ids=tokens(1, 2))
        assert not told
        program.trace(Step(), 1)
    assert told == [(0, 2), (1, 2)]
    model(input_ids=tokens(1, 2))
    assert len(told) == 2


def test_the_command_refuses_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was read")

    monkeypatch.setattr(FastWeightsForCausalLM, "from_pretrained", never)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", never)
    tiny().save_pretrained(tmp_path / "model")
    linear_llama().save_pretrained(tmp_path / "linear")
    (tmp_path / "there.pt2").touch()
    before = sorted(tmp_path.rglob("*"))

    def said(model: str, out: str, *options: str) -> str:
        assert main(["export", str(tmp_path / model), str(tmp_path / out), *options]) != 0
        return " ".join(capsys.readouterr().err.split())

    assert "exists; remove it or write elsewhere" in said("model", "there.pt2")
    assert "ends in .pt, which export does not write" in said("model", "new.pt")
    assert "leave one of them out" in said("model", "new.pt2", "--family", "llama")
    assert "--domain is of ONNX graphs" in said("model", "new.pt2", "--domain", "ai.onnx")
    assert "is a linearized_llama, which transformers reads as it is" in said("linear", "new")
    with NO_COMPILER:
        assert "there is no C++ compiler" in said("model", "new.pt2")
    assert sorted(tmp_path.rglob("*")) == before
