"""The verdict of measured numbers on the parts of a claim, and whether they are a test of it at
all.

A comparison of models tests something if each of them had a learning rate of its own and as many
updates as the others, the reference solved the task, and they stand between the task's floor and
its ceiling; two that solve a task which a control does not are equal. A part *holds* if the exact
test of its own leaves no more doubt than `SIGNIFICANCE`; it *does not hold* if the
contrary is as sure in spite of the number of parts, any of which could have failed by chance
(Holm's correction).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from fastweights.lab.reproduce.claim import (
    FLOOR,
    Claim,
    ClaimVerdict,
    Comparison,
    Experiment,
    Near,
    Scale,
    Statement,
    Term,
)
from fastweights.lab.reproduce.exact_tests import (
    SIGNIFICANCE,
    Interval,
    correct_for_parts,
    exact_test,
)
from fastweights.lab.reproduce.measures import At, Measures

FEWEST_RATES = 3
"""Learning rates that each model is to choose from."""


@dataclass(frozen=True)
class Check:
    """The result of testing a statement.

    Attributes:
        sentence: The statement with its places.
        difference: The measured difference of its two numbers.
        verdict: Whether the statement holds.
        reason: Why it is not tested; "" if it is.
    """

    sentence: str
    difference: Interval
    verdict: ClaimVerdict
    reason: str = ""


def judge(claim: Claim, experiment: Experiment, measures: Measures) -> tuple[Check, ...]:
    """Test every statement of a claim on what an experiment has measured.

    Raises:
        ValueError: If something that a statement is about was not measured.
    """
    compared = [statement.compare(measures) for statement in claim.statements]
    common = list(_flaws_of_experiment(claim, experiment, measures))
    updates = experiment.updates
    scale = experiment.scale
    lost = list(_flaws_of_all(scale, measures))
    flaws = [
        [
            *common,
            *_unequal_effort(statement, updates),
            *(
                lost
                if lost and _depends_on(statement, scale)
                else _flaws_of_part(claim, statement, scale, measures)
            ),
        ]
        for statement in claim.statements
    ]
    tested = [part for part, flaw in enumerate(flaws) if not flaw]
    against = dict(zip(tested, _doubts_against(claim, compared, tested), strict=True))
    return tuple(
        _check(claim.statements[part], compared[part], flaws[part], against.get(part, 1.0))
        for part in range(len(compared))
    )


def lack_of_rates(experiment: Experiment) -> str:
    """Why no verdict can come of an experiment whatever it measures; "" if one can."""
    if experiment.rates is None or experiment.rates >= FEWEST_RATES:
        return ""
    found = "one learning rate" if experiment.rates == 1 else f"{experiment.rates} rates"
    return f"{found} for every model, where {FEWEST_RATES} to choose from are asked"


def verdict_of(checks: Sequence[Check]) -> ClaimVerdict:
    """Return the verdict on a claim: it fails if any part does, and holds if all of them do."""
    parts = {check.verdict for check in checks}
    order = (ClaimVerdict.FAILS, ClaimVerdict.UNTESTED, ClaimVerdict.OPEN)
    return next((verdict for verdict in order if verdict in parts), ClaimVerdict.HOLDS)


def _check(
    statement: Statement, comparison: Comparison, flaws: Sequence[str], against: float
) -> Check:
    test = exact_test(comparison.first, comparison.second)
    if flaws:
        verdict = ClaimVerdict.UNTESTED
    elif statement.doubt(test) <= SIGNIFICANCE:
        verdict = ClaimVerdict.HOLDS
    elif against <= SIGNIFICANCE:
        verdict = ClaimVerdict.FAILS
    else:
        verdict = ClaimVerdict.OPEN
    return Check(comparison.sentence, test.interval, verdict, "; ".join(flaws))


def _doubts_against(
    claim: Claim, compared: Sequence[Comparison], tested: Sequence[int]
) -> list[float]:
    """Of the parts that are tested, by tests that can be sure enough for so many of them."""
    significance = SIGNIFICANCE / max(len(tested), 1)
    return correct_for_parts(
        [
            claim.statements[part].counter_doubt(
                exact_test(compared[part].first, compared[part].second, significance)
            )
            for part in tested
        ]
    )


def _flaws_of_experiment(claim: Claim, experiment: Experiment, measures: Measures) -> Iterator[str]:
    """Why nothing is tested."""
    yield from filter(None, [lack_of_rates(experiment)])
    for statement in claim.reference:
        comparison = statement.compare(measures)
        if not statement.allows(comparison.first.median - comparison.second.median):
            yield f"the reference failed: {comparison.sentence} is not so"


def _unequal_effort(statement: Statement, updates: Mapping[str, int]) -> Iterator[str]:
    """Whether the methods that a part compares were trained by different numbers of updates."""
    names = [term.series for term in statement.terms if term.series in updates]
    spent = {name: updates[name] for name in names}
    if len(set(spent.values())) > 1:
        yield "unequal effort: " + ", ".join(f"{name} {n:,} updates" for name, n in spent.items())


def _depends_on(statement: Statement, scale: Scale | None) -> bool:
    """Whether a statement means nothing where no model has learnt what the scale is of."""
    return scale is None or not scale.quantity or any(map(scale.is_about, statement.terms))


def _flaws_of_all(scale: Scale | None, measures: Measures) -> Iterator[str]:
    """Whether no model has learnt anything, anywhere."""
    if scale is None:
        return
    rows = measures.of(scale.quantity)
    places = [
        _Place(series, x, sample.median)
        for series in rows.series
        for x in rows.places(series)
        if (sample := rows.sample(series, x)) is not None
    ]
    floored = [_floored(place, scale, measures) for place in places]
    if floored and all(floored):
        yield f"no model has left the floor ({floored[0]})"


def _flaws_of_part(
    claim: Claim, statement: Statement, scale: Scale | None, measures: Measures
) -> Iterator[str]:
    """Why a part is not tested."""
    comparison = statement.compare(measures)
    if exact_test(comparison.first, comparison.second).interval.visible == inf:
        yield f"{len(comparison.first.values)} seeds are too few for a verdict"
    if scale is None:
        return
    learnt = [_Place.of(term, measures) for term in statement.terms if scale.is_about(term)]
    solved = len(learnt) > 1 and all(scale.is_at_ceiling(place.median) for place in learnt)
    if solved and not (isinstance(statement, Near) and _told_apart(claim, scale, measures)):
        yield "all of them have solved the task"
    yield from filter(None, (_floored(place, scale, measures) for place in learnt))


def _told_apart(claim: Claim, scale: Scale, measures: Measures) -> bool:
    """Whether a control has not solved the task, which those that are equal have."""
    return any(not scale.is_at_ceiling(_Place.of(term, measures).median) for term in claim.controls)


@dataclass(frozen=True)
class _Place:
    """Where a series stands at one place."""

    series: str
    x: At
    median: float

    @classmethod
    def of(cls, term: Term, measures: Measures) -> Self:
        x, sample = term.sample(measures)
        return cls(term.series, x, sample.median)


def _floored(place: _Place, scale: Scale, measures: Measures) -> str:
    """What a series is no better than; "" if it is."""
    floors = {row.series: row.value for row in measures.of(FLOOR) if row.x == place.x}
    if not floors:
        return ""
    highest = scale.highest(floors.values())
    if not scale.is_on_floor(place.median, highest):
        return ""
    name = next(name for name, value in floors.items() if value == highest)
    return f"{place.series} ({place.median:.4g}) is on the floor: {name}, {highest:.4g}"
