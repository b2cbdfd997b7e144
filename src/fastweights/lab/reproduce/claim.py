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

from fastweights.lab.reproduce.measures import At, Interval, Measure, Measures, Sample, shift

Figures = Mapping[str, Mapping[str, float]]
"""Numbers of a paper: series → column → number."""


class Verdict(Enum):
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

    def named(self, x: At) -> str:
        """Its name in a sentence, at the place `x`."""
        where = "" if x is None else f" at {x}" if isinstance(x, str) else f" at {x:g}"
        return f"{self.series}{where}{self.quantity and f' ({self.quantity})'}"


@dataclass(frozen=True)
class Check:
    """A statement tested: the sentence with its places, the difference, the verdict."""

    sentence: str
    difference: Interval
    verdict: Verdict


class Statement(ABC):
    """Something that two numbers, measured or given, can bear out or contradict."""

    first: Term
    second: Term | float

    @abstractmethod
    def sentence(self, first: str, second: str) -> str:
        """The statement of two named numbers."""

    @abstractmethod
    def judged(self, difference: Interval) -> Verdict:
        """The verdict on first - second."""

    def check(self, measures: Measures) -> Check:
        """The test of the statement on what was measured. Raises ValueError if its terms
        were not.
        """
        first, a = _found(self.first, measures)
        second, b = _found(self.second, measures)
        difference = shift(a, b)
        return Check(self.sentence(first, second), difference, self.judged(difference))


def _found(term: Term | float, measures: Measures) -> tuple[str, Sample]:
    """(its name in a sentence, its values)"""
    if isinstance(term, Term):
        x, sample = term.sample(measures)
        return term.named(x), sample
    return f"{term:g}", Sample((term,), exact=True)


@dataclass(frozen=True)
class Above(Statement):
    """first > second + by"""

    first: Term
    second: Term | float
    by: float = 0.0

    def sentence(self, first: str, second: str) -> str:
        return f"{first} > {second}" + (f" + {self.by:g}" if self.by else "")

    def judged(self, difference: Interval) -> Verdict:
        if difference.low > self.by:
            return Verdict.HOLDS
        return Verdict.FAILS if difference.high < self.by else Verdict.OPEN


@dataclass(frozen=True)
class Near(Statement):
    """|first - second| ≤ within"""

    first: Term
    second: Term | float
    within: float

    def sentence(self, first: str, second: str) -> str:
        return f"{first} = {second} ± {self.within:g}"

    def judged(self, difference: Interval) -> Verdict:
        if -self.within <= difference.low and difference.high <= self.within:
            return Verdict.HOLDS
        apart = difference.low > self.within or difference.high < -self.within
        return Verdict.FAILS if apart else Verdict.OPEN


@dataclass(frozen=True)
class Site:
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
    def run(self, site: Site) -> list[Measure]:
        """The numbers. A trial that takes long goes on where it was killed, in ``site.folder``."""

    def minutes(self, site: Site) -> float:
        """What earlier sittings, or other claims, have spent on it, where that is known."""
        return 0.0


class Recipe(ABC):
    """An experiment at one size, a frozen value."""

    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """All runs, in an order in which the first of them already say something."""

    def summary(self, measures: Measures) -> Measures:
        """What the claim is judged by, and drawn: averages, ratios, the best learning rate."""
        return measures


class Picture(ABC):
    """The form of the paper's figure, a frozen value."""

    @abstractmethod
    def draw(self, measures: Measures, title: str) -> Figure:
        """The numbers as that."""


@dataclass(frozen=True)
class Size:
    """minutes: about how long it takes, on 2 cores (cpu) or an H200 (gpu, paper); note: what this
    size cannot show
    """

    recipe: Recipe
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
    cpu: Size
    gpu: Size
    paper_size: Size
    picture: Picture
    figures: Figures = field(default_factory=dict)
    remark: str = ""

    @property
    def sizes(self) -> Mapping[str, Size]:
        return {"cpu": self.cpu, "gpu": self.gpu, "paper": self.paper_size}
