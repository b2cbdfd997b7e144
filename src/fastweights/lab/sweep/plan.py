"""What a sweep runs: every combination of tasks, models, widths, learning rates, weight decays and
seeds.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from fastweights.lab.tasks import TASKS, Protocol, Segment, TrainingSettings
from fastweights.mixers import plugin
from fastweights.runs.identity import first_fields, first_json_value, former_repr, key_of

EVERY = 100
"""Updates between two evaluations where there are no epochs."""


@dataclass(frozen=True)
class SweepModel:
    """A model of a sweep, called `label`.

    Attributes:
        name: one of the protocol's contenders, or a mixer's name: ``package.module:Class`` for
            one that is your own
        fields: of the configuration, in place of the protocol's
    """

    label: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: str | Mapping[str, Any]) -> SweepModel:
        """``"metala"``, or ``{label = …, name = …, and fields of the configuration}`` (name: the
        label's).
        """
        if isinstance(entry, str):
            return cls(entry, entry)
        given = dict(entry)
        if "label" not in given:
            raise ValueError(f"mixers: {given} lacks a label; tables and figures need one")
        label = str(given.pop("label"))
        return cls(label, str(given.pop("name", label)), given)


@dataclass(frozen=True)
class DecisiveSettings:
    """What decides the result of a sweep's run, whatever its plan calls task and model.

    Attributes:
        model: the class of the model
        config: the fields of its configuration that are not the class's own, as config.json has
            them
        training: without the grid of rates and weight decays
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
    """One training of one model, from nothing.

    Attributes:
        task: what the protocol is called
    """

    task: str
    protocol: Protocol
    contender: SweepModel
    rate: float
    decay: float
    seed: int
    every: int = EVERY

    def config(self) -> PretrainedConfig:
        """The model's configuration; makes a mixer known that is the user's own."""
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
        """The name of its results: equal runs have equal keys, in any plan."""
        return key_of(self.decisive)

    @cached_property
    def former_key(self) -> str:
        """The key of version 0."""
        config = first_json_value(self.config().to_dict())
        config.pop("transformers_version", None)
        training = self.protocol.training
        settings = {
            name: value
            for name, value in asdict(training).items()
            if name not in ("rates", "decays") and name in first_fields(training)
        }
        content = {
            "train": former_repr(self.protocol.train),
            "test": former_repr(self.protocol.test),
            "model": [self.protocol.task.kind.__name__, config],
            "training": settings,
            "schedule": former_repr(training.schedule),
            "run": [self.rate, self.decay, self.seed, self.every],
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
        tasks: protocols by name; patterns such as ``mqar-dsf-*`` when read from a file
        mixers: the models
        widths: hidden sizes; none means each protocol's first
        rates: learning rates; none means each protocol's own, and so for `decays`
        training: fields of `TrainingSettings`, in place of each protocol's (epochs or steps, batch,
            stop, …)
        every: updates between evaluations where there are no epochs
    """

    tasks: Mapping[str, Protocol]
    mixers: tuple[SweepModel, ...]
    widths: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = EVERY

    def runs(self) -> Iterator[SweepRun]:
        """All of them, the seeds innermost. Raises ValueError for models that cannot be built."""
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
                yield SweepRun(task, protocol, sized, rate, decay, seed, self.every)


def read_plan(path: Path) -> SweepPlan:
    """The plan in a TOML file. Raises ValueError, which says what is wrong, and where."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    try:
        return _plan(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _plan(content: dict[str, Any]) -> SweepPlan:
    known = [field.name for field in fields(SweepPlan)]
    unknown = sorted(content.keys() - set(known))
    missing = [name for name in ("tasks", "mixers") if not content.get(name)]
    if unknown or missing:
        raise ValueError(
            f"unknown: {', '.join(unknown) or 'nothing'}; missing:"
            f" {', '.join(missing) or 'nothing'}; a plan has {', '.join(known)}"
        )
    lists = {
        name: tuple(content[name])
        for name in ("widths", "rates", "decays", "seeds")
        if name in content
    }
    others = {name: content[name] for name in ("training", "every") if name in content}
    tasks = {name: TASKS[name] for pattern in content["tasks"] for name in match_tasks(pattern)}
    return SweepPlan(tasks, tuple(map(SweepModel.of, content["mixers"])), **lists, **others)


def match_tasks(pattern: str) -> list[str]:
    """The protocols that a name or pattern means; raises ValueError if there are none."""
    found = [name for name in TASKS if fnmatch(name, pattern)]
    if not found:
        raise ValueError(f"no task is called {pattern!r}; there are {', '.join(TASKS)}")
    return found


def _override_training(training: TrainingSettings, changes: Mapping[str, Any]) -> TrainingSettings:
    """`changes` that give steps take the place of epochs, and the other way round."""
    known = {field.name for field in fields(TrainingSettings)} - {"schedule", "rates", "decays"}
    if unknown := sorted(changes.keys() - known):
        raise ValueError(f"training takes {', '.join(sorted(known))}, not {', '.join(unknown)}")
    other = {"steps": "epochs", "epochs": "steps"}
    cleared = {other[name]: None for name in changes if name in other}
    return replace(training, **{**cleared, **changes})


def _of_width(contender: SweepModel, width: int) -> SweepModel:
    return replace(contender, fields={**contender.fields, "hidden_size": width})
