"""What a sweep trains: every combination of tasks, models, widths, rates, weight decays and
seeds."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from fastweights.errors import reason_of
from fastweights.lab.tasks import TASKS, Protocol, Segment, TrainingSettings
from fastweights.mixers import plugin
from fastweights.ranges import (
    NON_NEGATIVE_INTEGER,
    NON_NEGATIVE_NUMBER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
)
from fastweights.training.data.files import read_whole
from fastweights.training.loop.identity import key_of
from fastweights.training.loop.schedules import SCHEDULES, Schedule

EVERY = 100
"""Updates between two evaluations where there are no epochs."""


@dataclass(frozen=True)
class SweepModel:
    """A model that a sweep compares.

    Attributes:
        label: What tables and figures call it.
        name: One of the protocol's contenders, or a mixer's name: ``package.module:Class`` for one
            of your own.
        fields: Fields of the configuration that replace the protocol's.
    """

    label: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: str | Mapping[str, Any]) -> SweepModel:
        """Read a plan's entry: ``"metala"``, or ``{label = …, name = …, and fields of the
        configuration}``.

        Without a ``name`` the label is the name.

        Raises:
            ValueError: If the entry has no label.
        """
        if isinstance(entry, str):
            return cls(entry, entry)
        if not isinstance(entry, Mapping):
            raise ValueError(f"mixers: {entry!r} is neither a name nor a table with a label")
        given = dict(entry)
        if "label" not in given:
            raise ValueError(f"mixers: {given} lacks a label; tables and figures need one")
        label = str(given.pop("label"))
        return cls(label, str(given.pop("name", label)), given)


@dataclass(frozen=True)
class DecisiveSettings:
    """Everything that decides the result of a run, whatever the plan calls its task and model.

    Attributes:
        train: What is trained on.
        test: What is tested on.
        model: The model's class.
        config: The fields of its configuration that differ from the class's defaults, as in
            config.json.
        training: The protocol's settings without the grid of rates and weight decays.
        rate: Learning rate.
        decay: Weight decay.
        seed: Seed of weights and data.
        every: Updates between evaluations where there are no epochs.
        validation: What decides when to stop; None for the tests' distribution.
    """

    train: tuple[Segment, ...]
    test: tuple[Segment, ...]
    model: str
    config: Mapping[str, Any]
    training: TrainingSettings
    rate: float
    decay: float
    seed: int
    every: int
    validation: tuple[Segment, ...] | None = None


@dataclass(frozen=True)
class SweepRun:
    """One training of one model from scratch.

    Attributes:
        task: Name of the protocol.
        protocol: The protocol that the model is trained by.
        contender: The model.
        rate: Learning rate.
        decay: Weight decay.
        seed: Seed of weights and data.
        every: Updates between evaluations where there are no epochs.
    """

    task: str
    protocol: Protocol
    contender: SweepModel
    rate: float
    decay: float
    seed: int
    every: int = EVERY

    def config(self) -> PretrainedConfig:
        """Build the model's configuration; registers a mixer of the user's own."""
        names = {
            self.contender.name,
            *(mixer["name"] for mixer in self.contender.fields.get("mixers", ())),
        }
        for name in names:
            if ":" in name:
                plugin(name)
        return self.protocol.config(self.contender.name, **self.contender.fields)

    @cached_property
    def decisive(self) -> DecisiveSettings:
        """Everything that decides the result."""
        config = self.config().to_diff_dict()
        config.pop("transformers_version", None)
        return DecisiveSettings(
            self.protocol.train,
            self.protocol.test,
            self.protocol.task.kind.__name__,
            config,
            replace(self.protocol.training, rates=(), decays=()),
            self.rate,
            self.decay,
            self.seed,
            self.every,
            self.protocol.validation,
        )

    @cached_property
    def key(self) -> str:
        """The name of its result files: equal runs have equal keys, in any plan."""
        return key_of(self.decisive)


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep: which models are trained on which tasks, with which settings.

    Attributes:
        tasks: Protocols by name; patterns such as ``mqar-dsf-*`` when read from a file.
        mixers: The models.
        widths: Hidden sizes; none means each protocol's first.
        rates: Learning rates; none means each protocol's own.
        decays: Weight decays; none means each protocol's own.
        seeds: Seeds of weights and data.
        training: Fields of `TrainingSettings` that replace each protocol's (epochs or steps, batch,
            stop, …).
        every: Updates between evaluations where there are no epochs.

    Raises:
        ValueError: If a number lies outside of its range, or `training` has an unknown field.
    """

    tasks: Mapping[str, Protocol]
    mixers: tuple[SweepModel, ...]
    widths: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = EVERY

    def __post_init__(self) -> None:
        POSITIVE_INTEGER.require(every=self.every)
        POSITIVE_INTEGER.require_all(widths=self.widths)
        POSITIVE_NUMBER.require_all(rates=self.rates)
        NON_NEGATIVE_NUMBER.require_all(decays=self.decays)
        NON_NEGATIVE_INTEGER.require_all(seeds=self.seeds)
        if not self.seeds:
            raise ValueError("seeds = []; give one at least, such as [0], or leave them out")
        for protocol in self.tasks.values():
            _override_training(protocol.training, self.training)

    def runs(self) -> Iterator[SweepRun]:
        """Yield all runs, the seeds innermost.

        Raises:
            ValueError: If a model cannot be built.
        """
        for (task, protocol), contender in product(self.tasks.items(), self.mixers):
            protocol = replace(
                protocol, training=_override_training(protocol.training, self.training)
            )
            rates = self.rates or protocol.training.rates
            decays = self.decays or protocol.training.decays
            for width, rate, decay, seed in product(
                self.widths or (None,), rates, decays, self.seeds
            ):
                sized = contender if width is None else _of_width(contender, width)
                yield _buildable(SweepRun(task, protocol, sized, rate, decay, seed, self.every))


def read_plan(path: Path) -> SweepPlan:
    """Read a plan from a TOML file.

    Raises:
        ValueError: If the file cannot be read or is not a plan; the message says what is wrong, and
            where.
    """
    try:
        content = tomllib.loads(read_whole(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    try:
        return _plan(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {reason_of(error)}") from error


def _plan(content: dict[str, Any]) -> SweepPlan:
    known = [field.name for field in fields(SweepPlan)]
    unknown = sorted(content.keys() - set(known))
    missing = [name for name in ("tasks", "mixers") if not content.get(name)]
    if unknown or missing:
        raise ValueError(
            f"the plan has wrong fields: unknown: {', '.join(unknown) or 'nothing'}; missing:"
            f" {', '.join(missing) or 'nothing'}; a plan has {', '.join(known)}"
        )
    for name in ("tasks", "mixers"):
        if not isinstance(content[name], list):
            raise ValueError(f'{name} = {content[name]!r}; it must be a list, such as ["…"]')
    lists: dict[str, Any] = {
        name: tuple(given) if isinstance(given := content[name], list) else given
        for name in ("widths", "rates", "decays", "seeds")
        if name in content
    }
    others: dict[str, Any] = {
        name: content[name] for name in ("training", "every") if name in content
    }
    tasks = {label: task for entry in content["tasks"] for label, task in _tasks(entry).items()}
    return SweepPlan(tasks, tuple(map(SweepModel.of, content["mixers"])), **lists, **others)


def _tasks(entry: str | Mapping[str, Any]) -> dict[str, Protocol]:
    """Protocols by label, of a plan's entry: a pattern, or a table of label, name and fields of the
    protocol's tasks."""
    if isinstance(entry, str):
        return {name: TASKS[name] for name in match_tasks(entry)}
    if not isinstance(entry, Mapping) or not {"label", "name"} <= entry.keys():
        raise ValueError(f"tasks: {entry!r} is neither a name nor a table with a label and a name")
    sizes = {name: value for name, value in entry.items() if name not in ("label", "name")}
    found = match_tasks(entry["name"])
    if len(found) > 1:
        raise ValueError(f"tasks: {entry['name']!r} means {', '.join(found)}; name one of them")
    return {str(entry["label"]): TASKS[found[0]].sized(**sizes)}


def match_tasks(pattern: str) -> list[str]:
    """Return the names of the protocols that a name or pattern means.

    Raises:
        ValueError: If there are none.
    """
    found = [name for name in TASKS if fnmatch(name, pattern)]
    if not found:
        raise ValueError(f"no task is called {pattern!r}; there are {', '.join(TASKS)}")
    return found


def _override_training(training: TrainingSettings, changes: Mapping[str, Any]) -> TrainingSettings:
    """`changes` that give steps take the place of epochs, and the other way round."""
    if not isinstance(changes, Mapping):
        raise ValueError(f"training = {changes!r}; it must be a table, such as {{ steps = 1000 }}")
    known = {field.name for field in fields(TrainingSettings)} - {"rates", "decays"}
    if unknown := sorted(changes.keys() - known):
        raise ValueError(f"training takes {', '.join(sorted(known))}, not {', '.join(unknown)}")
    other = {"steps": "epochs", "epochs": "steps"}
    cleared = {other[name]: None for name in changes if name in other}
    read = {"schedule": _schedule(changes["schedule"])} if "schedule" in changes else {}
    taken: dict[str, Any] = {**cleared, **changes, **read}
    return replace(training, **taken)


def _schedule(given: Schedule | Mapping[str, Any]) -> Schedule:
    """A plan's ``{name = "cosine", warmup = 50}``."""
    if isinstance(given, Schedule):
        return given
    if not isinstance(given, Mapping) or given.get("name") not in SCHEDULES:
        raise ValueError(
            f"schedule = {given!r}; it must be a table with a name, one of {', '.join(SCHEDULES)}"
        )
    kind = SCHEDULES[given["name"]]
    settings = {name: value for name, value in given.items() if name != "name"}
    numbers = {field.name for field in fields(kind)} - {"shape"}
    if unknown := sorted(settings.keys() - numbers):
        raise ValueError(f"schedule takes {', '.join(sorted(numbers))}, not {', '.join(unknown)}")
    return kind(**settings)


def _buildable(run: SweepRun) -> SweepRun:
    """The run, whose configuration has been made."""
    try:
        run.key  # noqa: B018 (the key is one of the configuration)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{run.task}, {run.contender.label}: {reason_of(error)}") from error
    return run


def _of_width(contender: SweepModel, width: int) -> SweepModel:
    return replace(contender, fields={**contender.fields, "hidden_size": width})
