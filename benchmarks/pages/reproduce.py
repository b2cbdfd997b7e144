"""docs/reproduce.md: the claims' verdicts, from the outcomes in benchmarks/results/reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from fastweights.lab.reproduce import CLAIMS, Claim, ClaimVerdict, Scale
from fastweights.lab.reproduce.claim import FLOOR
from fastweights.lab.reproduce.computed import Computed
from fastweights.lab.reproduce.measures import At, Measure, Measures
from fastweights.lab.reproduce.theory import Theorem
from fastweights.render.markdown import table
from fastweights.render.plots import png
from fastweights.training.loop.identity import key_of
from pages.page import RESULTS, Page, Stretches, results

Outcome = dict[str, Any]


@cache
def _outcomes() -> dict[str, Outcome]:
    """What was measured, by claim and size."""
    names = sorted(path.stem for path in (RESULTS / "reproduce").glob("*.json"))
    return {name: results(f"reproduce/{name}") for name in names}


def _measured() -> Iterator[tuple[str, Claim, Outcome]]:
    """Each claim at each size that it was measured at, in the order of the claims."""
    for name, claim in CLAIMS.items():
        for size, sized in claim.sizes.items():
            outcome = _outcomes().get(f"{name}-{size}")
            if outcome and outcome.get("experiment") in (None, key_of(sized.experiment)):
                yield name, claim, outcome


GROUPS = {
    "Theorems and identities, executed": lambda claim, outcome: isinstance(
        claim.sizes[outcome["size"]].experiment, Theorem | Computed
    ),
    "Reproduced": lambda claim, outcome: outcome["verdict"] == ClaimVerdict.HOLDS.value,
    "Contradicted by two protocols": lambda claim, outcome: _protocols_that_fail(claim) > 1,
    "Left open, with one protocol against it": lambda claim, outcome: (
        outcome["verdict"] == ClaimVerdict.FAILS.value
    ),
    "Left open by the spread of seeds or timings": lambda claim, outcome: (
        outcome["verdict"] == ClaimVerdict.OPEN.value
    ),
    "Not tested": lambda claim, outcome: outcome["verdict"] == ClaimVerdict.UNTESTED.value,
}
"""Which claims stand together: each in the first group that takes it."""


def _protocols_that_fail(claim: Claim) -> int:
    """The protocols of the same statement that contradict it, if no other says anything else.
    Claims that share one at some size have one there.
    """
    fails = {
        outcome.get("experiment") or name: outcome["verdict"] == ClaimVerdict.FAILS.value
        for name, other, outcome in _measured()
        if (other.paper, other.place, other.statement)
        == (claim.paper, claim.place, claim.statement)
    }
    return len(fails) if all(fails.values()) else 0


def verdicts() -> str:
    groups: dict[str, list[tuple[str, ...]]] = {name: [] for name in GROUPS}
    for name, claim, outcome in _measured():
        group = next(key for key, takes in GROUPS.items() if takes(claim, outcome))
        groups[group].append(_row(name, claim, outcome))
    columns = ("claim", "paper", "", "at size", "parts that hold", "what this size cannot show")
    judged = [
        part
        for group, rows in groups.items()
        for part in (f"**{group}: {_statements(rows)}**", table(columns, rows) if rows else "None.")
    ]
    return "\n\n".join([*judged, *_waiting()])


def _statements(rows: list[tuple[str, ...]]) -> int:
    """Of how many statements the rows are, which may have several protocols."""
    return len({(place, statement) for _, place, statement, *_ in rows})


def _waiting() -> Iterator[str]:
    """Claims without an outcome of their protocol."""
    measured = {name for name, _, _ in _measured()}
    rows = [
        (
            f"`{name}`",
            f"{claim.paper}, {claim.place}",
            claim.statement,
            f"{claim.cpu.minutes:g}",
            claim.cpu.note,
        )
        for name, claim in CLAIMS.items()
        if name not in measured
    ]
    yield f"**Not measured by their present protocol: {len(rows)}**"
    columns = ("claim", "paper", "", "minutes at size cpu", "what this size cannot show")
    yield table(columns, rows) if rows else "None."


def _row(name: str, claim: Claim, outcome: Outcome) -> tuple[str, ...]:
    caveats = [claim.sizes[outcome["size"]].note, *_reasons(outcome)]
    return (
        f"[`{name}`](#{name.replace('.', '')})",
        f"{claim.paper}, {claim.place}",
        claim.statement,
        outcome["size"],
        _parts(outcome),
        " ".join(_sentence(caveat) for caveat in caveats if caveat),
    )


def _parts(outcome: Outcome) -> str:
    """How many parts hold of those that were tested."""
    tested = len(outcome["checks"]) - outcome["tally"].get("not tested", 0)
    return f"{outcome['tally'].get('holds', 0)} of {tested}" if tested else "none tested"


def _reasons(outcome: Outcome) -> list[str]:
    """Why nothing is tested, if all parts have the same reason."""
    reasons = {reason for check in outcome["checks"] for reason in check["reason"].split("; ")}
    common = [r for r in reasons if r and all(r in c["reason"] for c in outcome["checks"])]
    return sorted(common)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def sections() -> str:
    return "\n\n".join(part for found in _measured() for part in _section(*found))


def _section(name: str, claim: Claim, outcome: Outcome) -> Iterator[str]:
    size = claim.sizes[outcome["size"]]
    yield f"## {name}"
    yield f"{claim.paper}, {claim.place}: {claim.statement}"
    if claim.remark:
        yield claim.remark
    spent = f"Size {outcome['size']}, {outcome['minutes']:.1f} minutes, commit {outcome['commit']}."
    yield f"{spent} {size.note}".rstrip()
    columns = ("statement", "difference", "from", "to", "visible from", "verdict", "why")
    yield table(columns, map(_check, outcome["checks"]))
    if rows := list(_numbers(claim, outcome)):
        yield table((claim.unit, "", "floor", "ours (median, range)", "paper"), rows)
    yield f"![{name}](measured/{_picture(name, outcome)})"


def _check(check: Outcome) -> tuple[str, ...]:
    numbers = (_number(check[part]) for part in ("difference", "low", "high", "visible"))
    return check["sentence"], *numbers, check["verdict"], check["reason"]


def _number(x: float | None) -> str:
    return "∞" if x is None else f"{x:.3g}"


def _numbers(claim: Claim, outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """What was measured beside its floor and the paper's numbers, which may be of other places."""
    rows = Measures(Measure(**row) for row in outcome["measures"])
    main, scale = rows.of(""), claim.sizes[outcome["size"]].experiment.scale
    printed = {
        (series, column): f"{number:g}"
        for series, columns in claim.figures.items()
        for column, number in columns.items()
    }
    for series in main.series:
        for x in main.places(series):
            paper = printed.pop((series, "" if x is None else str(x)), "")
            yield series, "" if x is None else str(x), *_beside(rows, series, x, scale), paper
    for (series, column), number in printed.items():
        yield series, column, "", "", number


def _beside(rows: Measures, series: str, x: At, scale: Scale | None) -> tuple[str, str]:
    """The floor of a place, and what a series has reached there."""
    sample = rows.of("").sample(series, x)
    assert sample is not None
    floors = {row.value: row.series for row in rows.of(FLOOR) if row.x == x}
    reached = f"{sample.median:.4g} ({sample.low:.4g} – {sample.high:.4g})"
    if scale is None or not floors:
        return "", reached
    floor = scale.highest(floors)
    return f"{floor:.3g} ({floors[floor]})", reached


def _picture(name: str, outcome: Outcome) -> str:
    return f"reproduce/{name}-{outcome['size']}.png"


def _draw(claim: Claim, outcome: Outcome) -> bytes:
    measures = Measures(Measure(**row) for row in outcome["measures"])
    return png(claim.picture.draw(measures, f"{claim.paper}, {claim.place}"))


def _pictures() -> dict[str, Callable[[], bytes]]:
    return {
        _picture(name, outcome): partial(_draw, claim, outcome)
        for name, claim, outcome in _measured()
    }


PAGE = Page("reproduce", Stretches({"verdicts": verdicts, "sections": sections}), _pictures())
