"""`fastweights patch`: a script runs as Python runs it, but for what transformers computes with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.cli import main
from running import LONGEST

SCRIPT = """
import atexit, pickle, sys

class Thing:
    pass

print(sys.argv[1:], __name__, __file__, sys.path[0], "torch" in sys.modules)
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
atexit.register(lambda: print("the end of", __name__))
if "fail" in sys.argv:
    raise KeyError("a script's own")
sys.exit(sys.argv[-1] if "say" in sys.argv else int(sys.argv[-1]))
"""
MODEL = """
import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2, mamba_n_heads=4,
    num_attention_heads=2, num_key_value_heads=2, mamba_d_head=16, mamba_d_state=8,
    attn_layer_indices=[1],
)
model = BambaForCausalLM(config)
tokens = torch.arange(16)[None]
print(model(tokens, labels=tokens).loss.item())
"""
TOGETHER = f"""
import os
from torch import distributed

if "RANK" in os.environ:
    distributed.init_process_group("gloo")
{MODEL}
print(type(model).__name__)
"""


def run(folder: Path, *words: str, module: str | None = None) -> subprocess.CompletedProcess[str]:
    """Python with these words, or with the command in front of them."""
    start = [sys.executable, *(() if module is None else ("-m", *module.split()))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[1:])}
    return subprocess.run(
        [*start, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )


def patched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *words, module="fastweights.cli patch")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        ["things/script.py", "0"],
        ["things/script.py", "--quiet", "-m", "--", "--debug", "", "7"],
        ["./things/script.py", "fail"],
        ["things/script.py", "say", "that it did not work"],
        ["things/wrong.py"],
        ["link.py", "0"],
        ["-m", "things.script", "--help", "3"],
        ["-m", "things", "0"],
        ["-m", "things.script", "fail"],
    ],
    ids=" ".join,
)
def test_a_script_runs_as_python_runs_it(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "things"
    folder.mkdir()
    for name in ("script", "__main__"):
        (folder / f"{name}.py").write_text(SCRIPT)
    (folder / "__init__.py").touch()
    (folder / "wrong.py").write_text("this is no Python\n")
    (tmp_path / "link.py").symlink_to("things/script.py")
    theirs, ours = run(tmp_path, *words), patched(tmp_path, *words)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    frames = 'File "<frozen runpy>"'
    said = [line for line in theirs.stderr.splitlines() if frames not in line]
    assert ours.stderr.splitlines() == said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.py"], "there is no script nowhere.py; give the path of a file"),
        (["."], ". is a folder; give a script"),
        ([], "arguments are required: SCRIPT"),
        (["-m"], "arguments are required: SCRIPT"),
        (["-m", "json"], "there is no module json that can be run"),
        (["-m", "nowhere.at.all"], "there is no module nowhere.at.all that can be run"),
        (["--fast", "script.py"], "unrecognized arguments: --fast"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        status = main(["patch", *words])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert says in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.slow
def test_it_says_what_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "tokens.py").write_text("import transformers\n")
    (line,) = patched(tmp_path, "model.py").stderr.splitlines()
    assert line.startswith("fastweights: computed bamba (")
    assert "mamba2_chunk_scan" in line
    assert "no model was used" in patched(tmp_path, "tokens.py").stderr
    assert patched(tmp_path, "--quiet", "tokens.py").stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "processes"),
    [("torch.distributed.run --nproc-per-node=2", 2), ("accelerate.commands.launch --cpu", 1)],
)
def test_it_works_below_a_launcher(launcher: str, processes: int, tmp_path: Path) -> None:
    words = ["-m", "fastweights.cli", "patch", "train.py"]
    (tmp_path / "train.py").write_text(TOGETHER)
    ended = run(tmp_path, *words, module=launcher)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("fastweights: computed bamba (") == 1
    assert ended.stdout.count("BambaForCausalLM") == processes
    (tmp_path / "train.py").write_text("raise ValueError('its own')\n")
    ended = run(tmp_path, *words, module=launcher)
    assert ended.returncode == 1
    assert "ValueError: its own" in ended.stderr
