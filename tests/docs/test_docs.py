"""The literate pages run from top to bottom."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from test_readme import BLOCK, blocks, command_lines

DOCS = Path(__file__).parents[2] / "docs"
LITERATE = [
    "batch-invariance.md",
    "choose.md",
    "data.md",
    "dsf-by-example.md",
    "evals.md",
    "huggingface.md",
    "index.md",
    "linearize-recipes.md",
    "linearize.md",
    "new-mixer.md",
    "serving.md",
    "sweeps.md",
    "tasks.md",
    "transformers.md",
    "troubleshooting.md",
    "tutorials/analyse.md",
    "tutorials/convert.md",
    "tutorials/decode.md",
    "tutorials/paper.md",
    "tutorials/rule.md",
    "tutorials/train.md",
]
COMMANDS = [
    *LITERATE,
    "browser.md",
    "importing.md",
    "install.md",
    "mesa.md",
    "several-processes.md",
    "tutorials/finetune.md",
]


@pytest.mark.sampled
@pytest.mark.parametrize("page", LITERATE)
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = DOCS / page
    examples = [
        found["text"] for found in BLOCK.finditer(path.read_text()) if found["language"] == "python"
    ]
    assert examples
    namespace: dict[str, object] = {"__name__": path.stem}
    for example in examples:
        exec(compile(example, str(path), "exec", dont_inherit=True), namespace)


@pytest.mark.long
def test_going_on_from_a_model_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python and its commands in their order."""
    from fastweights.cli import main

    monkeypatch.chdir(tmp_path)
    page, namespace = DOCS / "tutorials" / "finetune.md", dict[str, object]()
    for block in BLOCK.finditer(page.read_text()):
        if block["language"] == "python":
            exec(compile(block["text"], str(page), "exec", dont_inherit=True), namespace)
        for line in block["text"].splitlines() if block["language"] == "bash" else ():
            assert main(shlex.split(line)[1:]) == 0
    for run in ("prose", "verse", "lora", "llama", "long", "python"):
        assert (tmp_path / "runs" / run / "model" / "config.json").exists()


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_parse(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights import cli, mixers

    monkeypatch.setattr(mixers, "plugin", lambda name: name)
    for program, *rest in command_lines(DOCS / page):
        if program == "fastweights":
            cli.build_parser().parse_args(rest)


def test_the_plan_of_the_page_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastweights.lab.sweep import read_plan

    (text,) = blocks("toml", page=DOCS / "sweeps.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "mymixer.py").write_text(
        "from fastweights.mixers import GLA\n\n\nclass MyMixer(GLA): ...\n"
    )
    (tmp_path / "plan.toml").write_text(text)
    assert len(list(read_plan(tmp_path / "plan.toml").runs())) == 3 * 2 * 2 * 5
