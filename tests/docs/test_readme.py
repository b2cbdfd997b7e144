"""What README.md shows works: its Python runs, its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
PROGRAMS = {"make", "pip", "fastweights"}
BLOCK = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str, page: Path = README) -> list[str]:
    return [
        found["text"]
        for found in BLOCK.finditer(page.read_text())
        if found["language"] in languages
    ]


def command_lines(page: Path = README) -> list[list[str]]:
    """The words of every shell command: prompts and comments dropped, continued lines joined."""
    lines = (
        "\n".join(blocks("bash", "sh", "shell", "console", page=page))
        .replace("\\\n", " ")
        .splitlines()
    )
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line for line in words if line]


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    examples = blocks("python")
    assert examples, "README.md shows no Python"
    namespace: dict[str, object] = {"__name__": "readme"}
    for example in examples:
        exec(compile(example, str(README), "exec", dont_inherit=True), namespace)


def test_commands_start_with_known_programs() -> None:
    commands = command_lines()
    assert commands, "README.md shows no commands"
    assert {command[0] for command in commands} <= PROGRAMS


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", README.with_name("Makefile").read_text(), re.MULTILINE))
    assert {
        target for program, *rest in command_lines() if program == "make" for target in rest
    } <= targets


def test_fastweights_commands_parse() -> None:
    from fastweights import cli

    parser = cli.build_parser()
    for program, *arguments in command_lines():
        if program == "fastweights":
            parser.parse_args(arguments)


def test_pictures_and_pages_exist() -> None:
    """What README.md shows and links by address, so that a package index shows it too, is here."""
    raw, site = (
        "https://raw.githubusercontent.com/fastweights/fastweights/main/",
        "https://fastweights.github.io/fastweights/",
    )
    text, root = README.read_text(), README.parent
    pictures = re.findall(rf"!\[[^\]]*\]\({raw}([^)]+)\)", text)
    pages = re.findall(rf"\]\({site}([^)#]*)\)", text)
    assert pictures
    assert pages
    assert text.count("![") == len(pictures)
    assert all((root / picture).is_file() for picture in pictures)
    for page in pages:
        found = root / "docs" / page.rstrip("/")
        assert found.with_suffix(".md").is_file() or (found / "index.md").is_file(), page
