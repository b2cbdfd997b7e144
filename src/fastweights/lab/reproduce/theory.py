"""Claims that are theorems: the propositions and lemmas of `analysis.theory`, executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure

from fastweights.analysis.theory import (
    Approximation,
    Embedding,
    LeastParameters,
    Overwriting,
    ReversedSigmoid,
    TaylorSoftmax,
    TheoryFinding,
    findings,
)
from fastweights.lab.reproduce.claim import FigureForm
from fastweights.lab.reproduce.measures import Measure, Measures
from fastweights.render.plots import canvas


@dataclass(frozen=True)
class FindingFigure(FigureForm):
    """The figure of a theorem: the finding's own picture.

    Attributes:
        source: The statement's source, such as "DSF Lemma 1".
    """

    source: str

    def draw(self, measures: Measures, title: str) -> Figure:
        figure, axes = canvas(width=5.2, height=3.6)
        finding(self.source).draw(axes[0, 0])
        return figure


def finding(source: str) -> TheoryFinding:
    """Return the finding of this source.

    Raises:
        ValueError: If there is none.
    """
    found = {one.source: one for one in findings()}
    if source not in found:
        raise ValueError(f"there is no finding {source!r}; there are {', '.join(found)}")
    return found[source]


def measures_of(found: TheoryFinding) -> Iterator[Measure]:
    """Yield the numbers of a finding as exact measures.

    Raises:
        TypeError: If it is not known how to measure this type of finding.
    """
    match found:
        case Overwriting():
            yield from (
                Measure(one.model, one.least, quantity="error of row 1") for one in found.attempts
            )
        case Approximation():
            for one in (*found.solutions, found.signed):
                yield Measure(one.groups, one.error, quantity="error of the map")
                yield Measure(one.groups, one.key, quantity="largest key")
            for length, key in zip(found.lengths, found.needed, strict=True):
                yield Measure("fixed decay", key, length, "largest key")
        case LeastParameters():
            for one in found.choices:
                yield Measure(one.name, float(one.sufficient), quantity="meets C1 and C2")
                yield Measure(one.name, one.size, quantity="groups")
            unsigned = [one for one in found.least if not one.signed]
            yield Measure("fewest that suffice", found.least[0].size, quantity="groups")
            yield Measure("choices with so few", len(found.least), quantity="groups")
            yield Measure("choices with so few, k ≥ 0", len(unsigned), quantity="groups")
        case TaylorSoftmax():
            for features, error in zip(found.features, found.map_errors, strict=True):
                yield Measure("Taylor features", error, features * found.values, "error of the map")
            for points, rank in zip(found.points, found.ranks, strict=True):
                yield Measure("rank of e^(x y)", rank / points, points, "rank / points")
        case ReversedSigmoid():
            for power, error in zip(found.powers, found.differences, strict=True):
                yield Measure("σ(-x)^a", error, power, "difference")
        case Embedding():
            for width, error in zip(found.widths, found.differences, strict=True):
                yield Measure("larger state", error, width, "difference")
        case _:
            raise TypeError(
                f"the numbers of a {type(found).__name__} are not known here; state them in numbers"
            )
