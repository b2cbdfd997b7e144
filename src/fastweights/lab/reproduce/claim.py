"""A claim of a paper: a statement that can hold or fail, the paper's figures, and experiments at
three sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from matplotlib.figure import Figure

from fastweights.lab.reproduce.measures import (
    At,
    Interval,
    Measure,
    Measures,
    Sample,
    hodges_lehmann,
)

Figures = Mapping[str, Mapping[str, float]]
"""Numbers of a paper: series → column → number."""


class ClaimVerdict(Enum):
    """What the numbers say of a statement."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "does not show"


@dataclass(frozen=True)
class Term:
    """Numbers of one series.

    Attributes:
        at: the name of a column, or which of the series' places, counted as in a list: 0 the
            first, -1 the last
        quantity: "" for what the experiment is about
    """

    series: str
    at: str | int = -1
    quantity: str = ""

    def sample(self, measures: Measures) -> tuple[At, Sample]:
        """(where, the values there). Raises ValueError if it was not measured."""
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
        """Its name in a sentence, at the place `x`."""
        where = "" if x is None else f" at {x}" if isinstance(x, str) else f" at {x:g}"
        return f"{self.series}{where}{self.quantity and f' ({self.quantity})'}"


@dataclass(frozen=True)
class Check:
    """A statement tested: the sentence with its places, the difference, the verdict."""

    sentence: str
    difference: Interval
    verdict: ClaimVerdict


class Statement(ABC):
    """Something that two numbers, measured or given, can bear out or contradict."""

    first: Term
    second: Term | float

    @abstractmethod
    def sentence(self, first: str, second: str) -> str:
        """The statement of two named numbers."""

    @abstractmethod
    def decide(self, difference: Interval) -> ClaimVerdict:
        """The verdict on first - second."""

    def check(self, measures: Measures) -> Check:
        """The test of the statement on what was measured. Raises ValueError if its terms
        were not.
        """
        first, a = _found(self.first, measures)
        second, b = _found(self.second, measures)
        difference = hodges_lehmann(a, b)
        return Check(self.sentence(first, second), difference, self.decide(difference))


def _found(term: Term | float, measures: Measures) -> tuple[str, Sample]:
    """(its name in a sentence, its values)"""
    if isinstance(term, Term):
        x, sample = term.sample(measures)
        return term.describe(x), sample
    return f"{term:g}", Sample((term,), exact=True)


@dataclass(frozen=True)
class Above(Statement):
    """first > second + by"""

    first: Term
    second: Term | float
    by: float = 0.0

    def sentence(self, first: str, second: str) -> str:
        return f"{first} > {second}" + (f" + {self.by:g}" if self.by else "")

    def decide(self, difference: Interval) -> ClaimVerdict:
        if difference.low > self.by:
            return ClaimVerdict.HOLDS
        return ClaimVerdict.FAILS if difference.high < self.by else ClaimVerdict.OPEN


@dataclass(frozen=True)
class Near(Statement):
    """|first - second| ≤ within"""

    first: Term
    second: Term | float
    within: float

    def sentence(self, first: str, second: str) -> str:
        return f"{first} = {second} ± {self.within:g}"

    def decide(self, difference: Interval) -> ClaimVerdict:
        if -self.within <= difference.low and difference.high <= self.within:
            return ClaimVerdict.HOLDS
        apart = difference.low > self.within or difference.high < -self.within
        return ClaimVerdict.FAILS if apart else ClaimVerdict.OPEN


@dataclass(frozen=True)
class TrialContext:
    """Where a trial works.

    Attributes:
        folder: of its own
        shared: for what other trials and claims can use as well; what lies there is named by
            all that decides it
        data: the user's, if any
        workers: processes for runs that do not depend on each other; None for as many as there
            are cores
    """

    folder: Path
    shared: Path
    device: torch.device
    data: Path | None = None
    workers: int | None = None

    def file(self, name: str) -> Path:
        """A file of the user's data. Raises ValueError if there is none."""
        if self.data is None or not (path := self.data / name).exists():
            raise ValueError(f"this size reads {name}; pass the folder that has it with --data")
        return path


class Trial(ABC):
    """One run of an experiment, a frozen value: what it measures is kept under its repr and never
    measured again.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """For people to read."""

    @abstractmethod
    def run(self, context: TrialContext) -> list[Measure]:
        """The numbers. A trial that takes long goes on where it was killed, in
        ``context.folder``.
        """

    def minutes(self, context: TrialContext) -> float:
        """What earlier sittings, or other claims, have spent on it, where that is known."""
        return 0.0


class Experiment(ABC):
    """An experiment at one size, a frozen value."""

    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """All runs, in an order in which the first of them already say something."""

    def summary(self, measures: Measures) -> Measures:
        """What the claim is judged by, and drawn: averages, ratios, the best learning rate."""
        return measures


class FigureForm(ABC):
    """The form of the paper's figure, a frozen value."""

    @abstractmethod
    def draw(self, measures: Measures, title: str) -> Figure:
        """The numbers as that."""


@dataclass(frozen=True)
class ClaimSize:
    """minutes: about how long it takes, on 2 cores (cpu) or an H200 (gpu, paper); note: what this
    size cannot show
    """

    experiment: Experiment
    minutes: float
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim and how to test it.

    Attributes:
        place: the table or figure
        statement: the paper's words, short
        statements: the same as inequalities and equations
        unit: of the numbers
        figures: the paper's, where it prints numbers
        remark: what the paper's own experiment is confounded by, or leaves open
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

    @property
    def sizes(self) -> Mapping[str, ClaimSize]:
        return {"cpu": self.cpu, "gpu": self.gpu, "paper": self.paper_size}
