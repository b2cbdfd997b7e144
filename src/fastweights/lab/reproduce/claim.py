"""A claim of a paper: a statement that can hold or fail, the paper's figures, and experiments at
three sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, nextafter
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from fastweights.lab.reproduce.exact_tests import ExactTest
from fastweights.lab.reproduce.measures import At, Measure, Measures, Sample
from fastweights.training.loop.processes import Alone, Processes

Figures = Mapping[str, Mapping[str, float]]
"""Numbers of a paper: series → column → number."""


FLOOR = "floor"
"""The quantity of floors: measures of what predictors reach that make nothing of the sequence."""


FIVE = (0, 1, 2, 3, 4)
"""The seeds of models that are judged, unless a claim has others."""


class ClaimVerdict(Enum):
    """The verdict of the measured numbers on a statement."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "does not show"
    UNTESTED = "not tested"


@dataclass(frozen=True)
class Term:
    """A series of numbers that a statement is about.

    Attributes:
        series: Name of the series.
        at: Name of a column, or index into the series' places: 0 the first, -1 the last.
        quantity: What was measured; "" for the experiment's main quantity.
        fails: Whether the paper says that it learns nothing.
    """

    series: str
    at: str | int = -1
    quantity: str = ""
    fails: bool = False

    def sample(self, measures: Measures) -> tuple[At, Sample]:
        """Return (place, values measured there).

        Raises:
            ValueError: If it was not measured.
        """
        rows = measures.of(self.quantity)
        places = rows.places(self.series)
        if isinstance(self.at, int):
            found = places[self.at] if -len(places) <= self.at < len(places) else None
        else:
            found = self.at
        sample = rows.sample(self.series, found)
        if sample is None:
            raise ValueError(f"{self} was not measured; there are {measures.series} at {places}")
        return found, sample

    def describe(self, x: At) -> str:
        """Return its name for a sentence, at the place `x`."""
        where = "" if x is None else f" at {x}" if isinstance(x, str) else f" at {x:g}"
        return f"{self.series}{where}{self.quantity and f' ({self.quantity})'}"


@dataclass(frozen=True)
class Comparison:
    """The two samples that a statement is about.

    Attributes:
        sentence: The statement with its places.
        first, second: What was measured.
    """

    sentence: str
    first: Sample
    second: Sample


class Statement(ABC):
    """A statement about two numbers, which measurements can confirm or contradict.

    Attributes:
        first, second: The numbers, measured or given.
    """

    first: Term | float
    second: Term | float

    @abstractmethod
    def sentence(self, first: str, second: str) -> str:
        """Return the statement as a sentence, given the names of its two numbers."""

    @abstractmethod
    def doubt(self, test: ExactTest) -> float:
        """Return the chance of numbers that speak for it so clearly, were it not true."""

    @abstractmethod
    def counter_doubt(self, test: ExactTest) -> float:
        """Return the chance of numbers that speak against it so clearly, were it true."""

    @abstractmethod
    def allows(self, difference: float) -> bool:
        """Whether it is true of numbers with this difference."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Those of its numbers that are measured."""
        return tuple(term for term in (self.first, self.second) if isinstance(term, Term))

    def compare(self, measures: Measures) -> Comparison:
        """Find its numbers among those measured.

        Raises:
            ValueError: If its terms were not measured.
        """
        first, a = _found(self.first, measures)
        second, b = _found(self.second, measures)
        return Comparison(self.sentence(first, second), a, b)


def _found(term: Term | float, measures: Measures) -> tuple[str, Sample]:
    """(its name in a sentence, its values)"""
    if isinstance(term, Term):
        x, sample = term.sample(measures)
        return term.describe(x), sample
    return f"{term:g}", Sample.constant(term)


@dataclass(frozen=True)
class Above(Statement):
    """The statement first > second + by."""

    first: Term | float
    second: Term | float
    by: float = 0.0

    def sentence(self, first: str, second: str) -> str:
        margin = f" {'-' if self.by < 0 else '+'} {abs(self.by):g}" if self.by else ""
        return f"{first} > {second}{margin}"

    def doubt(self, test: ExactTest) -> float:
        return test.doubt_above(self.by)

    def counter_doubt(self, test: ExactTest) -> float:
        return test.doubt_below(self.by)

    def allows(self, difference: float) -> bool:
        return difference > self.by


@dataclass(frozen=True)
class Near(Statement):
    """The statement |first - second| ≤ within."""

    first: Term | float
    second: Term | float
    within: float

    def sentence(self, first: str, second: str) -> str:
        return f"{first} = {second} ± {self.within:g}"

    def doubt(self, test: ExactTest) -> float:
        low, high = nextafter(-self.within, -inf), nextafter(self.within, inf)
        return max(test.doubt_above(low), test.doubt_below(high))

    def counter_doubt(self, test: ExactTest) -> float:
        one_side = min(test.doubt_above(self.within), test.doubt_below(-self.within))
        return min(1.0, 2 * one_side)

    def allows(self, difference: float) -> bool:
        return abs(difference) <= self.within


@dataclass(frozen=True)
class Scale:
    """What a quantity of an experiment says of models that have learnt nothing, or all.

    Attributes:
        margin: How far beyond the floor a model has learnt something.
        ceiling: The value from which on a model has learnt all; None if there is none.
        ascending: Whether more is better.
        quantity: The quantity; "" for the main one, on whose floor no other means anything either.
    """

    margin: float
    ceiling: float | None = None
    ascending: bool = True
    quantity: str = ""

    def is_about(self, term: Term) -> bool:
        """Whether the term is of a model that is to have learnt what the quantity says."""
        return term.quantity == self.quantity and not term.fails

    def is_on_floor(self, value: float, floor: float) -> bool:
        """Whether a model with this value is no better than the floor."""
        gain = value - floor if self.ascending else floor - value
        return gain < self.margin

    def is_at_ceiling(self, value: float) -> bool:
        """Whether a model with this value has nothing left to learn."""
        if self.ceiling is None:
            return False
        return value >= self.ceiling if self.ascending else value <= self.ceiling

    def highest(self, floors: Iterable[float]) -> float:
        """Return the best of several floors."""
        return max(floors) if self.ascending else min(floors)


@dataclass(frozen=True)
class TrialContext:
    """The folder, the device and the data that the trials of a claim share.

    Attributes:
        shared: Folder for results that other trials and claims can use too, named by all that
            decides them.
        device: Where models compute.
        data: Folder of the user's data, if any.
        workers: Processes for independent runs; None for as many as there are cores.
        processes: Those that train each model of a task together, of which this is the first.
    """

    shared: Path
    device: torch.device
    data: Path | None = None
    workers: int | None = None
    processes: Processes = Alone()

    def file(self, name: str) -> Path:
        """Return the path of a file in the user's data.

        Raises:
            ValueError: If no folder of data was given.
        """
        if self.data is None or not (path := self.data / name).exists():
            raise ValueError(
                f"this size of the claim reads {name}; pass the folder that has it with --data"
            )
        return path


@dataclass(frozen=True)
class OtherSettings:
    """Settings that take the place of an experiment's own; empty ones leave them.

    Attributes:
        rates: Learning rates that every model chooses from.
        seeds: Seeds of the models that are judged.
        steps: Updates of a training.
    """

    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not empty, by name."""
        return {name: value for name, value in vars(self).items() if value not in ((), None)}


def require_apart(tuning: Sequence[int], judged: Sequence[int]) -> None:
    """Refuse seeds that choose a learning rate and are judged at it, too.

    Raises:
        ValueError: If there are any.
    """
    if both := sorted({*tuning} & {*judged}):
        raise ValueError(
            f"seeds {', '.join(map(str, both))} choose the learning rates and cannot be judged by"
            " them; take others"
        )


class Trial(ABC):
    """One run of an experiment, a frozen value.

    Its numbers are kept under its record, so that it is never run twice.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the trial for people to read."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files in the user's data that it reads."""
        return ()

    @abstractmethod
    def run(self, context: TrialContext) -> list[Measure]:
        """Measure the numbers; a long trial resumes in ``context.shared`` where it was killed."""

    def minutes(self, context: TrialContext) -> float:
        """Return the minutes that earlier sessions, or other claims, have spent on it, as far as
        known."""
        return 0.0


class Experiment(ABC):
    """An experiment at one size, a frozen value."""

    trains_together: ClassVar[bool] = False
    """Whether several processes can train each of its models."""

    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """Return all trials, in an order in which the first of them are already informative."""

    @property
    def rates(self) -> int | None:
        """The number of learning rates that each model could choose from; None where the models
        are not trained, or by one published rate."""
        return None

    @property
    def updates(self) -> Mapping[str, int]:
        """How many updates each series is trained by, all its stages together; empty where all
        have the same by construction."""
        return {}

    @property
    def scale(self) -> Scale | None:
        """What a quantity says of models that have learnt nothing; None if it is not about
        learning."""
        return None

    def floors(self, context: TrialContext) -> Iterable[Measure]:
        """Measure the floors of the scale's quantity, a series for each of them, at every place."""
        return ()

    def with_settings(self, other: OtherSettings) -> Experiment:
        """Return the same experiment with other settings.

        Raises:
            ValueError: If it has no such settings.
        """
        raise ValueError(
            f"{', '.join(other.given)}: this claim trains no models by rates, seeds and steps that"
            " could be chosen; leave them out"
        )

    def summary(self, measures: Measures) -> Measures:
        """Compute the numbers by which the claim is judged and drawn: means, ratios, the best
        learning rate."""
        return measures


class FigureForm(ABC):
    """The form of the paper's figure, a frozen value."""

    @abstractmethod
    def draw(self, measures: Measures, title: str) -> Figure:
        """Draw the numbers in this form."""


@dataclass(frozen=True)
class ClaimSize:
    """The experiment that tests a claim at one size.

    Attributes:
        experiment: The experiment.
        minutes: About how long it takes, on 2 cores (cpu) or an H200 (gpu, paper).
        note: What this size cannot show.
        little: Why it says little of the paper's experiment, and leaves the claim untested; "" if
            it tests it.
        changes: Settings that are not the claim's own, by name.
    """

    experiment: Experiment
    minutes: float
    note: str = ""
    little: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and the experiments that test it.

    Attributes:
        paper: The paper.
        place: The table or figure.
        statement: The paper's words, abridged.
        statements: The same as inequalities and equations.
        unit: Unit of the numbers.
        cpu, gpu, paper_size: The experiments at three sizes.
        picture: The form of the figure.
        figures: The paper's numbers, where it prints them.
        remark: What the paper's own experiment is confounded by, or leaves open.
        reference: What must be true of the medians for the experiment to test anything, such as
            that softmax attention has solved the task.
        controls: Series that must not solve the task, so that two that do can be called equal.
    """

    paper: str
    place: str
    statement: str
    statements: tuple[Statement, ...]
    unit: str
    cpu: ClaimSize
    gpu: ClaimSize
    paper_size: ClaimSize
    picture: FigureForm
    figures: Figures = field(default_factory=dict)
    remark: str = ""
    reference: tuple[Statement, ...] = ()
    controls: tuple[Term, ...] = ()

    @property
    def sizes(self) -> Mapping[str, ClaimSize]:
        """The three sizes by name."""
        return {"cpu": self.cpu, "gpu": self.gpu, "paper": self.paper_size}

    def with_settings(self, size: str, other: OtherSettings) -> Claim:
        """Return the claim with other settings at one of its sizes.

        Raises:
            ValueError: If there is no such size, or it has no such settings.
        """
        if not other.given:
            return self
        old = self.at(size)
        new = replace(old, experiment=old.experiment.with_settings(other), changes=other.given)
        return replace(self, **{"paper_size" if size == "paper" else size: new})

    def at(self, size: str) -> ClaimSize:
        """Return the size of this name.

        Raises:
            ValueError: If there is none.
        """
        if size not in self.sizes:
            raise ValueError(
                f"there is no size {size!r} of this claim; there are {', '.join(self.sizes)}"
            )
        return self.sizes[size]
