"""Every option of every verb with values that make no sense: refused, in one sentence that names
option or value, before anything is written.

Whoever adds an option adds its row to `TABLE`; without it the first test fails.
"""

from __future__ import annotations

from argparse import REMAINDER, Action, _SubParsersAction
from dataclasses import dataclass

import pytest

from fastweights import cli
from fastweights.cli import build_parser, main
from here import parsers_of


@dataclass(frozen=True)
class Row:
    """What an option must not be.

    Attributes:
        values: Bad values.
        words: What the error says of each of them.
    """

    values: tuple[str, ...]
    words: str


NOT_WHOLE = ("1.5", "two", "nan", "inf", "1e3", "", "9" * 30)
NOT_FINITE = ("nan", "inf", "-inf", "one", "")
COUNT = Row(("0", "-1", *NOT_WHOLE), "does not fit; it must be 1 or more")
COUNT_OR_ZERO = Row(("-1", *NOT_WHOLE), "does not fit; it must be 0 or more")
LENGTH = Row(("1", "0", "-1", *NOT_WHOLE), "does not fit; it must be 2 or more")
COUNTS = Row(("0", "4,-1", "4,", "a", ""), "is not a list of numbers such as 1,2,5")
COUNTS_OR_ZERO = Row(("-1", "0,-1", "0,a", ""), "is not a list of numbers such as 1,2,5")
POSITIVE = Row(("0", "-1", "-1e-9", *NOT_FINITE), "does not fit; it must be above 0 and finite")
NOT_NEGATIVE = Row(("-1", "-1e-9", *NOT_FINITE), "does not fit; it must be 0 or more and finite")
FRACTION = Row(("1", "2", "-0.1", *NOT_FINITE), "does not fit; it must be at least 0 and below 1")
GIVEN = Row(("", " "), "is empty; name something, or leave the option out")
TEXT = Row(("\udcff",), "is not UTF-8")
SIZE = Row(("zz", "", "-1MiB", "1e9", "64 miles"), "is no number of bytes such as 64MiB")
CHOICE = Row(("zz", ""), "invalid choice")
OWN_MIXER = Row(("metala", "", "a:", ":B"), "write package.module:Class")

TABLE: dict[str, Row] = {
    "--accumulate": COUNT,
    "--batch": COUNT,
    "--batches": COUNTS,
    "--bits": Row(("3", "eight"), "invalid"),
    "--cache-budget": SIZE,
    "--state-budget": SIZE,
    "--cache-length": COUNT,
    "--checkpoint": GIVEN,
    "--checkpoint-every": COUNT,
    "--chunk": COUNT_OR_ZERO,
    "--clip": POSITIVE,
    "--convolution": COUNT_OR_ZERO,
    "--beta2": FRACTION,
    "--data": GIVEN,
    "--data-weights": POSITIVE,
    "--decay": FRACTION,
    "--decay-shape": CHOICE,
    "--device": Row(("gpu", "cuda:1", ""), "is not auto or cpu"),
    "--devices": COUNT,
    "--dropout": FRACTION,
    "--dtype": Row(("zz", "int8", ""), "is not one of float32"),
    "--eval-every": COUNT,
    "--domain": CHOICE,
    "--family": CHOICE,
    "--field": GIVEN,
    "--features": CHOICE,
    "--from": GIVEN,
    "--finetune-lr": POSITIVE,
    "--finetune-steps": COUNT_OR_ZERO,
    "--gates": CHOICE,
    "--feature-dim": COUNT,
    "--heads": COUNT,
    "--json": GIVEN,
    "--kl": NOT_NEGATIVE,
    "--layers": COUNT,
    "--length": LENGTH,
    "--limit": COUNT,
    "--load": GIVEN,
    "--log-every": COUNT,
    "--lora": COUNT,
    "--lr": POSITIVE,
    "--matrix-lr": POSITIVE,
    "--mfu": POSITIVE,
    "--mixer": OWN_MIXER,
    "--mixers": Row(("[]", '["metala"]', '[{"heads": 2}]'), 'an object with a "name"'),
    "--only": GIVEN,
    "--optimizer": CHOICE,
    "--out": GIVEN,
    "--patience": POSITIVE,
    "--positions": CHOICE,
    "--prefixes": COUNT,
    "--preset": GIVEN,
    "--price": POSITIVE,
    "--prompt": TEXT,
    "--prompt-by": CHOICE,
    "--rank-by": CHOICE,
    "--ranking": GIVEN,
    "--rates": Row(("0", "1e-3,-1", "1e-3,", "a", ""), "is not a list of numbers such as 1,2,5"),
    "--ray": GIVEN,
    "--recipe": Row(("zz", "lolcat", "zz.txt"), "is no recipe; take one of lolcats"),
    "--reference": GIVEN,
    "--rule": CHOICE,
    "--sinks": COUNT_OR_ZERO,
    "--sample": COUNT_OR_ZERO,
    "--scale": POSITIVE,
    "--schedule": CHOICE,
    "--seconds": POSITIVE,
    "--seed": COUNT_OR_ZERO,
    "--seeds": COUNTS_OR_ZERO,
    "--shots": COUNT_OR_ZERO,
    "--size": GIVEN,
    "--softmax-layers": COUNT_OR_ZERO,
    "--stage": GIVEN,
    "--slices": COUNT,
    "--steps": COUNT,
    "--suite": CHOICE,
    "--system": GIVEN,
    "--tasks": GIVEN,
    "--teacher": GIVEN,
    "--stream": COUNT,
    "--temperature": NOT_NEGATIVE,
    "--template": GIVEN,
    "--text": GIVEN,
    "--tokenizer": Row(("bpe:many", "bpe:", "bpe:-1"), "after bpe: comes the number of tokens"),
    "--tokens": COUNT,
    "--tol": POSITIVE,
    "--tolerance": POSITIVE,
    "--top-k": COUNT,
    "--top-logits": COUNT,
    "--track": CHOICE,
    "--trained": COUNT,
    "--until": GIVEN,
    "--transfer-lr": POSITIVE,
    "--transfer-steps": COUNT_OR_ZERO,
    "--validation": GIVEN,
    "--validation-tokens": LENGTH,
    "--vocabulary": COUNT,
    "--warmup": COUNT_OR_ZERO,
    "--weight-decay": NOT_NEGATIVE,
    "--width": COUNT,
    "--window": COUNT,
    "--workers": COUNT,
    "--z-loss": NOT_NEGATIVE,
    "checkpoint": GIVEN,
    "out": GIVEN,
    "claim": GIVEN,
    "model": GIVEN,
    "models": GIVEN,
    "names": GIVEN,
    "plan": GIVEN,
    "program": CHOICE,
    "prompt": TEXT,
    "recipe": GIVEN,
    "script": GIVEN,
    "tables": GIVEN,
    # where an option means something of its own
    "analyze --tokens": LENGTH,
    "bench decode --tokens": COUNT_OR_ZERO,
    "bench mesa --tokens": LENGTH,
    "eval harness --shots": COUNTS_OR_ZERO,
    "eval needles --depths": Row(
        LENGTH.values, "does not fit; it must be 2 or more, a whole number below 2^63, for the beg"
    ),
    "eval needles --lengths": COUNTS,
    "eval needles --repeats": COUNT,
    "eval perplexity --tokens": LENGTH,
    "linearize bench --prompt": COUNT,
    "linearize bench --tokens": COUNTS,
    "plan --device": GIVEN,
    "plan --tokens": POSITIVE,
    "sweep --mixer": Row(("", " "), "is empty"),
    "sweep --workers": COUNT_OR_ZERO,
    "linearize plan --layers": COUNTS_OR_ZERO,
    "linearize plan --window": COUNT_OR_ZERO,
    "linearize run --layers": COUNTS_OR_ZERO,
    "linearize run --window": COUNT_OR_ZERO,
}
"""By the name of the option, or by verb and option."""

LATER: dict[str, Row] = {
    "train --data": Row(("/nowhere.txt",), "no text found at '/nowhere.txt'"),
    "train --stream": Row(("5", "4095"), "tokens of a block; take 4,096"),
    "train --preset": Row(("zz",), "there is no preset 'zz'"),
    "train --mixers": Row(("zz", "metala,zz"), "unknown mixer 'zz'"),
    "train --tokenizer": Row(("/nowhere",), "no tokenizer at '/nowhere'"),
    "train --layers": Row(("1000000000",), "of memory; make it smaller"),
    "train --width": Row(("100000000", "10"), "hidden_size = 10"),
    "train --matrix-lr": Row(("0.01",), "--matrix-lr is a learning rate of --optimizer muon"),
    "train --decay": Row(("0.2", "0"), "--decay and --decay-shape are of --schedule wsd"),
    "train --decay-shape": Row(("sqrt", "linear"), "and this is cosine; leave them out"),
    "generate checkpoint": Row(("/",), "no model at /"),
    "chat checkpoint": Row(("/",), "no model at /"),
    "train --template": Row(("/nowhere",), "neither none nor a file with a chat template"),
    "generate --mixer": Row(("zz.zz:Z", "builtins:int", "math:pi"), "cannot use"),
    "patch script": Row(("/nowhere.py", "/"), "give "),
    "plan recipe": Row(("zz",), "no recipe is called 'zz'"),
    "plan --device": Row(("h1000",), "did you mean h100?"),
    "plan --mfu": Row(("1.5",), "it is at most 1"),
    "plan --preset": Row(("zz",), "there is no preset 'zz'"),
    "plan --mixers": Row(("zz",), "unknown mixer 'zz'"),
    "plan --from": Row(("/nowhere",), "no model at /nowhere"),
    "check checkpoint": Row(("/",), "no model at /"),
    "check --only": Row(("zz", ",", " , "), "in its name; there are causal, cached tokens"),
    "check --json": Row(("/nowhere/found.json",), "there is no folder /nowhere; make it"),
    "linearize plan --recipe": Row(("/nowhere.toml",), "cannot read /nowhere.toml"),
    "linearize plan --stage": Row(("zz", "zz.steps=1", "transfer.zz=1"), "t"),
    "linearize run --until": Row(("zz",), "there is no step 'zz' in this run; there are plan"),
    "linearize run --ranking": Row(("/nowhere.json", "/"), "as a ranking ("),
    "linearize run --cache-length": Row(("64",), "is the length of --cache-budget; give both"),
    "linearize plan --cache-length": Row(("64",), "is the length of --cache-budget; give both"),
    "list names": Row(("zz",), "unknown mixers: zz"),
    "table tables": Row(("zz",), "unknown tables: zz"),
    "sweep plan": Row(("/nowhere.toml",), "cannot read /nowhere.toml"),
    "bench ops --only": Row(("zz",), "no case matches 'zz'"),
    "bench decode --only": Row(("zz",), "nothing matches 'zz'; there are decay none"),
    "bench train --only": Row(("zz",), "no mixer matches 'zz'"),
    "bench mesa --checkpoint": Row(("/nowhere",), "no model at /nowhere"),
    "eval perplexity --reference": Row(("zz",), "--reference zz is not among the models"),
    "eval needles --lengths": Row(("512,256", "512,512"), "do not ascend"),
    "eval harness --tasks": Row(("zz",), "--suite lolcats has no task zz; it has arc_challenge"),
    "eval harness --data": Row(("/nowhere",), "there is no folder /nowhere"),
    "eval tasks --tasks": Row(("zz",), "no task is called 'zz'"),
    "eval tasks --data": Row(("/nowhere",), "/nowhere/hellaswag_val.jsonl does not exist"),
    "reproduce claim": Row(("zz",), "zz"),
    "reproduce --size": Row(("zz",), "there is no size 'zz'"),
}
"""Values that have a form and no meaning: refused by what the verb does, before it writes."""

REQUIRED: dict[str, list[str]] = {
    "generate": ["none"],
    "chat": ["none"],
    "export": ["none", "out"],
    "import": ["none", "--out=out"],
    "quantize": ["none", "out"],
    "plan": ["--tokens=1e9"],
    "sweep": ["none.toml"],
    "check": ["none"],
    "eval perplexity": ["none", "--text=none.txt"],
    "eval tasks": ["none", "--data=none"],
    "eval needles": ["none"],
    "eval harness": ["none", "--suite=lolcats"],
    "linearize plan": ["none"],
    "linearize generate": ["none", "a prompt"],
    "linearize bench": ["none"],
    "reproduce": ["metala-a2.1"],
}
"""What a verb cannot do without; conversions take a model, text and a folder."""
CONVERSION = ["none", "--out=out", "--data=none.txt"]


def name_of(action: Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest


PARSER = build_parser()
OPTIONS: dict[str, tuple[str, Action]] = {
    f"{verb} {name_of(action)}": (verb, action)
    for verb, parser in parsers_of(PARSER)
    for action in parser._actions
    if not isinstance(action, _SubParsersAction) and action.nargs != REMAINDER
    if action.dest not in ("help", "debug", "version")
}
VALUED = [name for name, (_, action) in OPTIONS.items() if action.nargs != 0]


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    """The command makes its parser once for all of these."""
    monkeypatch.setattr(cli, "build_parser", lambda: PARSER)


def row_of(option: str) -> Row | None:
    return TABLE.get(option) or TABLE.get(option.split()[-1])


def arguments(option: str, value: str) -> list[str]:
    """The command with this value, and with whatever else the verb needs."""
    verb, action = OPTIONS[option]
    others = REQUIRED.get(verb, CONVERSION if verb.startswith("linearize") else [])
    if not action.option_strings:
        positionals = [word for word in others if not word.startswith("--")]
        flags = [word for word in others if word.startswith("--")]
        place = {"prompt": 1, "out": 1}.get(action.dest, 0)
        positionals[place : place + 1] = [value]
        return [*verb.split(), *positionals, *flags]
    name = action.option_strings[0]
    return [
        *verb.split(),
        *(word for word in others if not word.startswith(f"{name}=")),
        f"{name}={value}",
    ]


def refusal(capsys, *words: str) -> str:
    """The last line that a command says which must be refused."""
    try:
        status = main(words)
    except SystemExit as stopped:
        status = stopped.code
    said = capsys.readouterr()
    assert status == 2, words
    assert said.out == ""
    *usage, line = said.err.rstrip("\n").split("\n")
    assert line.startswith("fastweights")
    assert not usage or usage[0].startswith("usage: fastweights")
    assert "Traceback" not in said.err
    assert "--debug" not in line
    return line


def test_every_option_has_a_row():
    assert [name for name in VALUED if row_of(name) is None] == []


def test_every_row_has_an_option():
    known = {*OPTIONS, *(name.split()[-1] for name in OPTIONS)}
    assert [name for name in (*TABLE, *LATER) if name not in known] == []


@pytest.mark.parametrize("option", VALUED)
def test_what_makes_no_sense_is_refused(option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = row_of(option)
    assert row is not None
    assert row.values
    for value in row.values:
        said = refusal(capsys, *arguments(option, value))
        assert f"argument {'/'.join(OPTIONS[option][1].option_strings) or ''}" in said
        assert row.words in said
        assert repr(value)[1:-1] in said
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("option", LATER)
def test_what_means_nothing_is_refused(option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in LATER[option].values:
        assert LATER[option].words in refusal(capsys, *arguments(option, value))
    assert not any(tmp_path.iterdir())
