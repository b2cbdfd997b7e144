"""The exact tests behind verdicts, and what is not tested at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest
import torch

from fastweights.lab.reproduce import (
    CLAIMS,
    Above,
    Claim,
    ClaimSize,
    ClaimVerdict,
    Experiment,
    Measure,
    Measures,
    Near,
    Outcome,
    Sample,
    Scale,
    Statement,
    Term,
    Trial,
    exact_test,
    judge,
)
from fastweights.lab.reproduce.claim import FLOOR
from fastweights.lab.reproduce.exact_tests import (
    SIGNIFICANCE,
    _ranks,
    _signed_ranks,
    correct_for_parts,
)
from fastweights.lab.reproduce.judge import lack_of_rates, verdict_of
from fastweights.lab.reproduce.n_grams import DISCOUNT, NGrams
from fastweights.lab.reproduce.pictures import Bars

Numbers = tuple[float, ...]
LOW, HIGH, MIXED = (
    (1.0, 2.0, 3.0, 4.0, 5.0),
    (11.0, 12.0, 13.0, 14.0, 15.0),
    (0.0, 2.5, 3.5, 4.5, 20.0),
)


def _apart(values: Numbers, first: int = 0) -> Sample:
    return Sample(values, tuple(range(first, first + len(values))))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (4, 4), (5, 3)])
def test_ranks_count_every_order_of_two_samples(m: int, n: int) -> None:
    found = [0] * (m * n + 1)
    for places in combinations(range(m + n), m):
        others = [x for x in range(m + n) if x not in places]
        found[sum(x > y for x in places for y in others)] += 1
    assert _ranks(m, n) == tuple(found)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_signed_ranks_count_every_choice_of_signs(n: int) -> None:
    found = [0] * (n * (n + 1) // 2 + 1)
    for signs in product((-1, 1), repeat=n):
        x = [sign * 2.0**size for size, sign in enumerate(signs)]
        means = [x[i] + x[j] for i in range(n) for j in range(i, n)]
        found[sum(mean > 0 for mean in means)] += 1
    assert _signed_ranks(n) == tuple(found)


def test_small_samples_exclude_nothing() -> None:
    few = exact_test(_apart((2.0, 3.0)), _apart((0.0, 1.0), 9)).interval
    assert (few.low, few.visible) == (-inf, inf)
    assert exact_test(_apart((2.0, 3.0, 4.0)), _apart((0.0, 1.0, -1.0), 9)).interval.low == 1.0


def test_seeds_are_compared_with_themselves() -> None:
    """What seeds have in common is no doubt about a difference."""
    common = np.random.default_rng(0).normal(size=5)
    a, b = (tuple((common + shift).tolist()) for shift in (0.1, 0.0))
    paired = exact_test(_apart(a), _apart(b)).interval
    assert paired.low == pytest.approx(0.1)
    assert exact_test(_apart(a), _apart(b, 9)).interval.low < 0


def test_exact_numbers_differ_without_doubt() -> None:
    test = exact_test(Sample.constant(3.0), Sample.constant(1.0))
    assert (test.interval.low, test.interval.high) == (2.0, 2.0)
    assert (test.doubt_above(1.9), test.doubt_above(2.0), test.doubt_below(2.1)) == (0.0, 1.0, 0.0)


def test_a_sample_and_a_number_differ_by_signs() -> None:
    number = Sample.constant(1.0)
    assert exact_test(_apart((2.0, 3.0, 4.0, 5.0)), number).interval.low == -inf
    assert exact_test(_apart((2.0, 3.0, 4.0, 5.0, 6.0)), number).interval.low == 1.0


@pytest.mark.parametrize("shared", [True, False], ids=["pairs", "apart"])
def test_intervals_miss_a_true_difference_as_rarely_as_they_say(shared: bool) -> None:
    generator, draws = torch.Generator().manual_seed(0), 2000
    a, b = (shift + torch.randn(draws, 5, generator=generator) for shift in (0, 1))
    found = [
        exact_test(_apart(tuple(x)), _apart(tuple(y), 0 if shared else 9)).interval
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    allowed = SIGNIFICANCE + 3 * (SIGNIFICANCE * (1 - SIGNIFICANCE) / draws) ** 0.5
    assert sum(one.low > -1 for one in found) / draws <= allowed
    assert sum(one.high < -1 for one in found) / draws <= allowed


def test_doubts_of_parts_are_holms() -> None:
    assert correct_for_parts([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert correct_for_parts([]) == []


class Given(Experiment):
    """Numbers as they are, of models with `rates` to choose from."""

    def __init__(
        self,
        rates: int | None = None,
        scale: Scale | None = None,
        updates: Mapping[str, int] | None = None,
    ) -> None:
        self._rates, self._scale, self._updates = rates, scale, updates or {}

    def trials(self) -> list[Trial]:
        return []

    @property
    def rates(self) -> int | None:
        return self._rates

    @property
    def scale(self) -> Scale | None:
        return self._scale

    @property
    def updates(self) -> Mapping[str, int]:
        return self._updates


def _claim(statements: Iterable[Statement], *reference: Statement) -> Claim:
    size = ClaimSize(Given(), 0.1)
    sizes = (size, size, size)
    return Claim(
        "none", "nowhere", "", tuple(statements), "", *sizes, Bars("value"), reference=reference
    )


def _measures(**series: Numbers) -> Measures:
    return Measures(
        Measure(name, x, seed=seed)
        for name, values in series.items()
        for seed, x in enumerate(values)
    )


@pytest.mark.parametrize(
    ("statement", "first", "second", "verdict"),
    [
        (Above(Term("a"), Term("b")), HIGH, LOW, ClaimVerdict.HOLDS),
        (Above(Term("a"), Term("b")), LOW, HIGH, ClaimVerdict.FAILS),
        (Above(Term("a"), Term("b")), LOW, MIXED, ClaimVerdict.OPEN),
        (Above(Term("a"), Term("b"), 20), HIGH, LOW, ClaimVerdict.FAILS),
        (Above(Term("a"), 10), HIGH, LOW, ClaimVerdict.HOLDS),
        (Near(Term("a"), Term("b"), 5), LOW, LOW, ClaimVerdict.HOLDS),
        (Near(Term("a"), Term("b"), 1), LOW, MIXED, ClaimVerdict.OPEN),
    ],
)
def test_verdicts(
    statement: Statement, first: Numbers, second: Numbers, verdict: ClaimVerdict
) -> None:
    checks = judge(_claim([statement]), Given(), _measures(a=first, b=second))
    assert checks[0].verdict is verdict
    assert verdict_of(checks) is verdict


def test_several_parts_fail_by_what_five_seeds_can_show_of_them() -> None:
    """Signed ranks of five pairs stop at 1 in 32, which of two parts would mean nothing."""
    statements = [Above(Term("a"), Term("b")), Above(Term("a"), Term("c"))]
    checks = judge(_claim(statements), Given(), _measures(a=LOW, b=HIGH, c=HIGH))
    assert [check.verdict for check in checks] == [ClaimVerdict.FAILS] * 2
    close = tuple(x + 0.5 for x in LOW)
    checks = judge(_claim(statements), Given(), _measures(a=LOW, b=close, c=close))
    assert [check.verdict for check in checks] == [ClaimVerdict.OPEN] * 2


def test_one_rate_or_a_reference_that_failed_is_no_test() -> None:
    numbers, part = _measures(a=HIGH, b=LOW), Above(Term("a"), Term("b"))
    assert judge(_claim([part]), Given(3), numbers)[0].verdict is ClaimVerdict.HOLDS
    for claim, experiment, reason in (
        (_claim([part]), Given(1), "one learning rate"),
        (_claim([part], Above(Term("a"), 99)), Given(), "a > 99 is not so"),
    ):
        (check,) = judge(claim, experiment, numbers)
        assert check.verdict is ClaimVerdict.UNTESTED
        assert reason in check.reason


def test_floors_and_ceilings_are_no_test() -> None:
    scale, part = Scale(margin=1.0, ceiling=11.0), Above(Term("a"), Term("b"))
    floor = Measure("chance", 3.5, quantity=FLOOR)

    def reason(first: Numbers, second: Numbers, statement: Statement = part) -> str:
        rows = Measures([*_measures(a=first, b=second), floor])
        return judge(_claim([statement]), Given(3, scale), rows)[0].reason

    assert "b (3) is on the floor: chance, 3.5" in reason(HIGH, LOW)
    assert "no model has left the floor" in reason(LOW, LOW)
    assert "solved" in reason(HIGH, HIGH)
    assert reason((6.0,) * 5, HIGH) == ""
    assert reason(HIGH, LOW, Above(Term("a"), Term("b", fails=True))) == ""


def test_a_floor_of_one_quantity_says_nothing_of_others() -> None:
    scale = Scale(0.0, ascending=False, quantity="PPL")
    learnt, other = (Above(Term("a", quantity=q), Term("b", quantity=q)) for q in ("PPL", "KL"))

    def reasons(a: Numbers, b: Numbers) -> list[str]:
        rows = [
            Measure(name, value, None, quantity, seed)
            for quantity in ("PPL", "KL")
            for name, values in (("a", a), ("b", b))
            for seed, value in enumerate(values)
        ]
        measures = Measures([*rows, Measure("3-grams", 9.0, quantity=FLOOR)])
        checks = judge(_claim([learnt, other]), Given(3, scale), measures)
        return [check.reason for check in checks]

    assert reasons(HIGH, LOW) == ["a (13) is on the floor: 3-grams, 9", ""]
    assert reasons(HIGH, HIGH) == [
        "no model has left the floor (a (13) is on the floor: 3-grams, 9)",
        "",
    ]
    assert reasons(LOW, LOW) == ["", ""]


def test_two_that_solve_what_a_control_does_not_are_equal() -> None:
    scale, equal = Scale(margin=1.0, ceiling=11.0), Near(Term("a"), Term("b"), 3)
    for control, verdict in ((MIXED, ClaimVerdict.HOLDS), (HIGH, ClaimVerdict.UNTESTED)):
        rows = _measures(a=HIGH, b=HIGH, c=control)
        claim = replace(_claim([equal]), controls=(Term("c"),))
        assert judge(claim, Given(3, scale), rows)[0].verdict is verdict
        more = replace(claim, statements=(Above(Term("a"), Term("b")),))
        assert judge(more, Given(3, scale), rows)[0].verdict is ClaimVerdict.UNTESTED


def test_one_seed_is_no_test() -> None:
    (check,) = judge(_claim([Above(Term("a"), Term("b"))]), Given(), _measures(a=(2.0,), b=(1.0,)))
    assert (check.verdict, check.reason) == (
        ClaimVerdict.UNTESTED,
        "1 seeds are too few for a verdict",
    )


def test_a_lack_of_rates_is_known_before_anything_runs() -> None:
    assert lack_of_rates(Given(1)).startswith("one learning rate for every model")
    assert lack_of_rates(Given(2)).startswith("2 rates")
    assert (lack_of_rates(Given(3)), lack_of_rates(Given())) == ("", "")


def test_unequal_effort_is_no_test() -> None:
    """Of the parts that compare methods with other numbers of updates."""
    statements = [Above(Term("a"), Term("b")), Above(Term("a"), Term("c"))]
    rows, spent = _measures(a=HIGH, b=LOW, c=LOW), {"a": 120, "b": 60, "c": 120}
    unequal, equal = judge(_claim(statements), Given(updates=spent), rows)
    assert unequal.verdict is ClaimVerdict.UNTESTED
    assert unequal.reason == "unequal effort: a 120 updates, b 60 updates"
    assert equal.verdict is ClaimVerdict.HOLDS


@pytest.mark.parametrize("name", ["lolcats-table1", "lolcats-table2"])
@pytest.mark.parametrize("size", ["cpu", "gpu", "paper"])
def test_every_conversion_of_a_claim_has_equal_effort(name: str, size: str) -> None:
    assert len(set(CLAIMS[name].sizes[size].experiment.updates.values())) == 1


def test_a_size_that_says_little_tests_nothing() -> None:
    claim, rows = _claim([Above(Term("a"), Term("b"))]), _measures(a=HIGH, b=LOW)
    checks = judge(claim, Given(), rows)
    outcome = Outcome("claim", claim, "cpu", rows, checks, 0.0, 1, ())
    assert outcome.verdict is ClaimVerdict.HOLDS
    little = replace(claim, cpu=replace(claim.cpu, little="another experiment"))
    assert replace(outcome, claim=little).verdict is ClaimVerdict.UNTESTED


def test_what_contradicts_outweighs_what_is_not_tested() -> None:
    statements = [Above(Term("a"), Term("b")), Above(Term("c"), Term("d"))]
    rows = _measures(a=LOW, b=HIGH, c=(2.0,), d=(1.0,))
    checks = judge(_claim(statements), Given(), rows)
    assert verdict_of(checks) is ClaimVerdict.FAILS
    assert verdict_of(checks[1:]) is ClaimVerdict.UNTESTED


def test_n_grams_are_probabilities() -> None:
    tokens = np.random.default_rng(0).integers(5, size=200).tolist()
    counts = NGrams(tokens, 3, vocabulary=7)
    for context in ((), (1,), (1, 2), (6,), (6, 6)):
        assert sum(counts.probability(context, x) for x in range(7)) == pytest.approx(1)
    seen = sum(a == 1 and b == 2 for a, b in pairwise(tokens))
    after = sum(a == 1 for a in tokens[:-1])
    kinds = len({b for a, b in pairwise(tokens) if a == 1})
    shorter = counts.probability((), 2)
    wanted = (seen - DISCOUNT) / after + DISCOUNT * kinds / after * shorter
    assert counts.probability((1,), 2) == pytest.approx(wanted)


def test_n_grams_learn_what_neighbours_say() -> None:
    text = [0, 1, 2, 3] * 100
    counts = NGrams(text, 3, vocabulary=4)
    losses = [counts.loss(text, order) for order in (1, 2, 3)]
    assert losses[0] == pytest.approx(np.log(4), rel=0.05)
    assert losses[1] < 0.05
    assert counts.loss([0, 1, 3], 2, (1,)) == counts.loss([0, 1], 2) < counts.loss([0, 1, 3], 2)
