"""Words behind `fastweights` that make no sense together: a status of 2 and one line."""

from __future__ import annotations

import contextlib
import io
import os
from argparse import Action
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st

from fastweights.cli import build_parser, main
from here import parsers_of
from laws import law

MISSING = "/nowhere/at all"
STARTS: dict[str, list[str]] = {
    "train": [f"--data={MISSING}"],
    "generate": [MISSING],
    "export": [MISSING, "out"],
    "import": [MISSING, "--out=out"],
    "analyze": [MISSING],
    "sweep": [f"{MISSING}.toml"],
    "eval perplexity": [MISSING, f"--text={MISSING}"],
    "eval tasks": [MISSING, f"--data={MISSING}"],
    "linearize run": [MISSING, "--out=out", f"--data={MISSING}"],
    "linearize plan": [MISSING],
    "linearize bench": [MISSING],
    "reproduce": ["no such claim"],
    "list": ["no such mixer"],
    "table": ["no such table"],
    "": [],
}
"""What makes each verb fail: what it is to read is not there."""


PARSERS = dict(parsers_of(build_parser()))
WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
SAID = st.one_of(
    WORD,
    st.sampled_from(["", "-", "--", "nan", "-1", "0", "1e999", "[", '[{"name": 3}]', "a,b", "{}"]),
    st.integers().map(str),
    st.floats().map(str),
)


def options_of(verb: str) -> list[Action]:
    actions = PARSERS[verb]._actions
    return [a for a in actions if a.option_strings and a.dest not in ("help", "version", "debug")]


def option(verb: str) -> st.SearchStrategy[list[str]]:
    """An option of a verb with any value, or any word."""
    named = [
        st.builds(lambda value, name=a.option_strings[-1]: [f"{name}={value}"], SAID)
        for a in options_of(verb)
    ]
    return st.one_of(*named, SAID.map(lambda word: [f"--{word}"]), SAID.map(lambda word: [word]))


COMMANDS = st.sampled_from(sorted(STARTS)).flatmap(
    lambda verb: st.lists(option(verb), max_size=4).map(
        lambda words: [*verb.split(), *STARTS[verb], *(w for some in words for w in some)]
    )
)


def said_of(words: list[str]) -> tuple[int, str]:
    """Status and standard error of the command."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(words)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return status, said.getvalue()


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
@law(calls=800, few=40, words=COMMANDS)
def test_words_that_make_no_sense_are_refused_in_one_line(words: list[str]) -> None:
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            status, said = said_of(words)
            left = list(Path(folder).iterdir())
        finally:
            os.chdir(before)
    assert "Traceback" not in said
    assert "add --debug" not in said
    assert left == []
    if status == 2:
        *usage, line = said.rstrip("\n").split("\n")
        assert line.startswith("fastweights")
        assert not usage or usage[0].startswith("usage: fastweights")
    else:
        assert (status, said) == (0, "")
        assert words[:1] in ([], ["list"], ["table"])
