"""What the command says of itself, and that it says what the code does."""

from __future__ import annotations

import dataclasses
from argparse import SUPPRESS, Action, _SubParsersAction
from importlib import import_module

import pytest

from fastweights.cli import build_parser, main
from fastweights.cli.argument_types import Number
from fastweights.cli.parser import Deferred
from fastweights.cli.parsers import linearize, measuring, models, shared, training
from fastweights.cli.settings import LibraryField
from here import parsers_of

PARSERS = {parser.prog: parser for _, parser in parsers_of(build_parser())}
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
    """Those that are read from the source of the code, or written again."""
    from fastweights.importers import FAMILIES
    from fastweights.linearize import FEATURE_MAPS, RULES

    assert ", ".join(sorted(FAMILIES)) == models.READ
    assert tuple(FEATURE_MAPS) == linearize.FEATURES
    assert tuple(RULES) == linearize.RULES


def chosen(*arguments: str):
    return build_parser().parse_args(arguments)


def test_defaults_of_training_are_those_of_the_code() -> None:
    from fastweights.cli.verbs.train import train_config
    from fastweights.train import TrainConfig

    assert train_config(chosen("train")) == TrainConfig()


def test_defaults_of_linearization_are_those_of_the_code() -> None:
    from fastweights.cli.verbs.linearize import conversion
    from fastweights.linearize.distill.pipeline import Conversion
    from fastweights.linearize.distill.recipes import RECIPES
    from fastweights.training.data.documents import Data

    found = conversion(chosen("linearize", "MODEL", "--data", "TEXT", "--out", "OUT"))
    assert found == Conversion("MODEL", Data(("TEXT",)), RECIPES["landmarks"])
    assert {stage.fit.steps for stage in RECIPES["landmarks"].stages} == {400}  # as the help says


def test_training_and_linearizing_take_trackers() -> None:
    given = ["--track", "wandb", "--track", "tensorboard"]
    linearized = ["linearize", "MODEL", "--data", "TEXT", "--out", "OUT"]
    for verb in (["train"], linearized):
        assert chosen(*verb).track == []
        assert chosen(*verb, *given).track == ["wandb", "tensorboard"]


@pytest.mark.parametrize("stage", linearize.STAGES)
def test_stages_are_verbs_too(stage: str) -> None:
    rest = ["MODEL", "--data", "TEXT", "--out", "OUT"]
    found = chosen("linearize", stage, *rest)
    assert vars(found) == vars(chosen("linearize", "run", *rest, "--until", stage))
    assert f"    {stage} " not in PARSERS["fastweights linearize"].format_help()


def test_settings_are_those_of_the_dataclasses() -> None:
    """Every default that is read from the source of a class is that of the class."""
    read = [
        setting
        for module in (shared, linearize, measuring, models, training)
        for kind in vars(module).values()
        if isinstance(kind, type)
        for setting in vars(kind).values()
        if isinstance(setting, LibraryField)
    ]
    for setting in read:
        module, _, name = setting.place.partition(":")
        kind = getattr(import_module(f"fastweights.{module}"), name)
        fields = {field.name: field.default for field in dataclasses.fields(kind)}
        assert fields[setting.name] == setting.default
    assert len(read) > 20


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from fastweights.linearize.distill.recipes import RECIPE_NOTES, RECIPES

    assert main(["linearize", "recipes"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in RECIPES)
    assert RECIPE_NOTES.keys() == RECIPES.keys()
