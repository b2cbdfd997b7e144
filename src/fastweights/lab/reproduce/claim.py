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
    """The verdict of the measured numbers on a statement."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "does not show"


@dataclass(frozen=True)
class Term:
    """A series of numbers that a statement is about.

    Attributes:
        series: Name of the series.
        at: Name of a column, or index into the series' places: 0 the first, -1 the last.
        quantity: What was measured; "" for the experiment's main quantity.
    """

    series: str
    at: str | int = -1
    quantity: str = ""

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
class Check:
    """The result of testing a statement.

    Attributes:
        sentence: The statement with its places.
        difference: The measured difference of its two numbers.
        verdict: Whether the statement holds.
    """

    sentence: str
    difference: Interval
    verdict: ClaimVerdict


class Statement(ABC):
    """A statement about two numbers, which measurements can confirm or contradict.

    Attributes:
        first: The first number.
        second: The second number, measured or given.
    """

    first: Term
    second: Term | float

    @abstractmethod
    def sentence(self, first: str, second: str) -> str:
        """Return the statement as a sentence, given the names of its two numbers."""

    @abstractmethod
    def decide(self, difference: Interval) -> ClaimVerdict:
        """Return the verdict on first - second."""

    def check(self, measures: Measures) -> Check:
        """Test the statement on measured numbers.

        Raises:
            ValueError: If its terms were not measured.
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
    """The statement first > second + by."""

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
    """The statement |first - second| ≤ within."""

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
    """The folder, the device and the data that the trials of a claim share.

    Attributes:
        shared: Folder for results that other trials and claims can use too, named by all that
            decides them.
        device: Where models compute.
        data: Folder of the user's data, if any.
        workers: Processes for independent runs; None for as many as there are cores.
    """

    shared: Path
    device: torch.device
    data: Path | None = None
    workers: int | None = None

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


class Trial(ABC):
    """One run of an experiment, a frozen value.

    Its numbers are kept under its record, so that it is never run twice.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the trial for people to read."""

    @abstractmethod
    def run(self, context: TrialContext) -> list[Measure]:
        """Measure the numbers; a long trial resumes in ``context.shared`` where it was killed."""

    def minutes(self, context: TrialContext) -> float:
        """Return the minutes that earlier sessions, or other claims, have spent on it, as far as
        known."""
        return 0.0


class Experiment(ABC):
    """An experiment at one size, a frozen value."""

    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """Return all trials, in an order in which the first of them are already informative."""

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
    """

    experiment: Experiment
    minutes: float
    note: str = ""


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
        """The three sizes by name."""
        return {"cpu": self.cpu, "gpu": self.gpu, "paper": self.paper_size}
