"""docs/reproduce.md: the claims' verdicts, from the outcomes in benchmarks/results/reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median
from typing import Any

from fastweights.lab.reproduce import CLAIMS, Claim
from fastweights.lab.reproduce.measures import Measure, Measures
from fastweights.render.markdown import table
from fastweights.render.plots import png
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
        for size in claim.sizes:
            if outcome := _outcomes().get(f"{name}-{size}"):
                yield name, claim, outcome


def verdicts() -> str:
    columns = ("claim", "paper", "", "at size", "verdict", "parts that hold", "minutes")
    return table(columns, (row for name, claim in CLAIMS.items() for row in _verdicts(name, claim)))


def _verdicts(name: str, claim: Claim) -> Iterator[tuple[str, ...]]:
    paper = f"{claim.paper}, {claim.place}"
    of_claim = [outcome for other, _, outcome in _measured() if other == name]
    if not of_claim:
        yield f"`{name}`", paper, claim.statement, "", "not run yet", "", ""
    for outcome in of_claim:
        yield (
            f"[`{name}`](#{name.replace('.', '')})",
            paper,
            claim.statement,
            outcome["size"],
            f"**{outcome['verdict']}**",
            f"{outcome['tally'].get('holds', 0)} of {len(outcome['checks'])}",
            f"{outcome['minutes']:.1f}",
        )


def sections() -> str:
    return "\n\n".join(part for found in _measured() for part in _section(*found))


def _section(name: str, claim: Claim, outcome: Outcome) -> Iterator[str]:
    size = claim.sizes[outcome["size"]]
    yield f"## {name}"
    yield f"{claim.paper}, {claim.place}: {claim.statement}"
    if claim.remark:
        yield claim.remark
    if size.note:
        yield f"Size {outcome['size']}: {size.note}"
    columns = ("statement", "difference", "from", "to", "verdict")
    yield table(columns, map(_check, outcome["checks"]))
    if claim.figures:
        yield table((claim.unit, "", "paper", "ours (median, range)"), _figures(claim, outcome))
    yield f"![{name}](measured/{_picture(name, outcome)})"


def _check(check: Outcome) -> tuple[str, ...]:
    numbers = (_number(check[part]) for part in ("difference", "low", "high"))
    return check["sentence"], *numbers, check["verdict"]


def _number(x: float | None) -> str:
    return "∞" if x is None else f"{x:.3g}"


def _figures(claim: Claim, outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """The paper's numbers beside ours."""
    for series, columns in claim.figures.items():
        for column, printed in columns.items():
            yield series, column, f"{printed:g}", _ours(outcome, series, column)


def _ours(outcome: Outcome, series: str, column: str) -> str:
    """Whatever was measured of this series in this column, a place or a quantity."""
    values = [
        row["value"]
        for row in outcome["measures"]
        if row["series"] == series
        and column in (str(row["x"]), row["quantity"])
        and "updates" not in row["quantity"]
    ]
    return f"{median(values):.4g} ({min(values):.4g} – {max(values):.4g})" if values else ""


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
