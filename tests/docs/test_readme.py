"""What README.md shows works: its Python runs, its commands exist."""

from __future__ import annotations

import re
import shlex
import tomllib
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


SITE = "https://fastweights.github.io/fastweights/"
RAW = "https://raw.githubusercontent.com/fastweights/fastweights/main/"
BLOB = "https://github.com/fastweights/fastweights/blob/main/"
LINK = re.compile(r"(?P<picture>!?)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def links(text: str) -> list[tuple[bool, str]]:
    """(whether it is a picture, its target) of all of them."""
    prose = BLOCK.sub("", text)
    return [(bool(found["picture"]), found["target"]) for found in LINK.finditer(prose)]


def readme_of_the_index() -> str:
    """README.md as the metadata of a built package has it."""
    project = tomllib.loads(README.with_name("pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"] == [{"path": "README.md"}]
    text = README.read_text()
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_pictures_and_pages_exist() -> None:
    root = README.parent
    found = links(README.read_text())
    pages = [target.removeprefix(SITE) for _, target in found if target.startswith(SITE)]
    files = [target for _, target in found if "://" not in target]
    assert pages
    assert [target for picture, target in found if picture if "://" in target] == []
    assert all((root / file).is_file() for file in files)
    for page in pages:
        place = root / "docs" / page.split("#")[0].rstrip("/")
        assert place.with_suffix(".md").is_file() or (place / "index.md").is_file(), page


def test_a_package_index_gets_addresses() -> None:
    """For every file that README.md shows or links: of its content for a picture."""
    rewritten = readme_of_the_index()
    here, there = links(README.read_text()), links(rewritten)
    assert any("://" not in target for _, target in here)
    for (picture, target), (_, address) in zip(here, there, strict=True):
        root = RAW if picture else BLOB
        assert address == (target if "://" in target else f"{root}{target}")
    assert BLOCK.findall(rewritten) == BLOCK.findall(README.read_text())
