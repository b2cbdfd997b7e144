"""What the command says of itself, and that it says what the code does."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction
from collections.abc import Iterator

import pytest

from fastweights.cli import build_parser
from fastweights.cli.argument_types import Number
from fastweights.cli.parser import Deferred
from fastweights.cli.parsers import bench, eval, import_, linearize, table, train


def parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    """This parser, and those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for verb in action.choices.values():
                yield from parsers(verb)


PARSERS = {parser.prog: parser for parser in parsers(build_parser())}
OPTIONS = {
    f"{name} {action.dest}": (parser, action)
    for name, parser in PARSERS.items()
    for action in parser._actions
    if not isinstance(action, _SubParsersAction) and action.help != SUPPRESS
    if action.dest != "help"
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_verb_says_what_it_does(name: str) -> None:
    said = PARSERS[name].description
    assert said is not None
    assert said[0].isupper()
    assert len(said.split()) >= 4


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_says_what_it_is(name: str) -> None:
    parser, action = OPTIONS[name]
    assert action.help is not None
    assert action.help[0].isupper()
    assert len(action.help.split("(default")[0].split()) >= 3
    assert parser._get_formatter()._expand_help(action)


def has_told_default(action: Action) -> bool:
    return action.nargs == 0 or action.required or action.help is None or "default" in action.help


def test_numbers_that_have_defaults_tell_them() -> None:
    numbers = {
        name: action for name, (_, action) in OPTIONS.items() if isinstance(action.type, Number)
    }
    untold = [name for name, action in numbers.items() if not has_told_default(action)]
    assert numbers
    assert untold == []


def test_every_verb_has_code() -> None:
    deferred = [
        found
        for parser in PARSERS.values()
        for found in parser._defaults.values()
        if isinstance(found, Deferred)
    ]
    assert len(deferred) > 20
    assert all(callable(found.load()) for found in deferred)


def test_choices_are_those_of_the_code() -> None:
    from fastweights.analysis.tables import TABLES
    from fastweights.cli.verbs.train import DECAYS, SCHEDULES
    from fastweights.importers import FAMILIES
    from fastweights.lab.bench.mesa import MesaPlan
    from fastweights.lab.evals.items import SOURCES
    from fastweights.linearize import FEATURE_MAPS, RULES
    from fastweights.linearize.convert.config import GATES, POSITIONS
    from fastweights.linearize.distill.criteria import CRITERIA
    from fastweights.linearize.distill.recipes import RECIPES
    from fastweights.runs.tracking import TRACKERS

    assert (tuple(SCHEDULES), tuple(TRACKERS)) == (train.SCHEDULES, train.TRACKERS)
    assert tuple(DECAYS) == train.SHAPES
    assert tuple(TABLES) == table.TABLES
    assert tuple(sorted(FAMILIES)) == import_.FAMILIES
    assert MesaPlan().parts == bench.MESA_PARTS
    assert tuple(SOURCES) == eval.TASKS
    assert (tuple(RECIPES), tuple(FEATURE_MAPS), tuple(RULES)) == (
        tuple(linearize.RECIPES),
        linearize.FEATURE_MAPS,
        linearize.RULES,
    )
    assert tuple(CRITERIA) == linearize.CRITERIA
    assert tuple(GATES) == linearize.GATES
    assert tuple(POSITIONS) == linearize.POSITIONS


def chosen(*arguments: str):
    return build_parser().parse_args(arguments)


def test_defaults_of_training_are_those_of_the_code() -> None:
    from fastweights.cli.verbs.train import train_config
    from fastweights.train import Architecture, LoRA, TrainConfig

    assert train_config(chosen("train")) == TrainConfig()
    assert LoRA().rank == train.RANK
    assert (Architecture().layers, Architecture().width) == (train.LAYERS, train.WIDTH)


def test_defaults_of_linearization_are_those_of_the_code() -> None:
    from fastweights.cli.verbs.linearize import conversion
    from fastweights.lab.bench.linearized import TOKENS
    from fastweights.linearize.distill.pipeline import Conversion
    from fastweights.linearize.distill.recipes import RECIPES
    from fastweights.text.documents import Data

    found = conversion(chosen("linearize", "MODEL", "--data", "TEXT", "--out", "OUT"))
    assert found == Conversion("MODEL", Data(("TEXT",)), RECIPES["landmarks"])
    assert {stage.fit.steps for stage in RECIPES["landmarks"].stages} == {linearize.STEPS}
    assert TOKENS == linearize.TOKENS


def test_training_and_linearizing_take_trackers() -> None:
    given = ["--track", "wandb", "--track", "tensorboard"]
    linearized = ["linearize", "MODEL", "--data", "TEXT", "--out", "OUT"]
    for verb in (["train"], linearized):
        assert chosen(*verb).track == []
        assert chosen(*verb, *given).track == ["wandb", "tensorboard"]


def test_defaults_of_measurements_are_those_of_the_code() -> None:
    from fastweights.analysis.profile import ProfileLimits
    from fastweights.lab.bench.mesa import MesaPlan
    from fastweights.lab.bench.timing import Budget

    assert chosen("bench", "ops").seconds == Budget().seconds
    mesa = chosen("bench", "mesa")
    assert MesaPlan(text=mesa.text, tokens=mesa.tokens, length=mesa.length) == MesaPlan()
    limits = chosen("analyze")
    assert ProfileLimits(heads=limits.heads, window=limits.window) == ProfileLimits()
