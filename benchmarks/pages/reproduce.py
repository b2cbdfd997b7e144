"""docs/reproduce.md: the claims' verdicts, from the outcomes in benchmarks/results/reproduce."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from fastweights.lab.reproduce import CLAIMS, Claim, ClaimSize, ClaimVerdict, Scale
from fastweights.lab.reproduce.claim import FLOOR
from fastweights.lab.reproduce.computed import Computed
from fastweights.lab.reproduce.measures import At, Measure, Measures
from fastweights.render.markdown import table
from fastweights.render.plots import png
from fastweights.training.loop.identity import key_of
from pages.page import RESULTS, Page, results

Outcome = dict[str, Any]


@cache
def _outcomes() -> dict[str, Outcome]:
    """What was measured, by claim and size."""
    names = sorted(path.stem for path in (RESULTS / "reproduce").glob("*.json"))
    return {name: results(f"reproduce/{name}") for name in names}


@cache
def _measured() -> list[tuple[str, Claim, Outcome]]:
    """Each claim at each size that it was measured at, in the order of the claims."""
    return [
        (name, claim, outcome)
        for name, claim in CLAIMS.items()
        for size, sized in claim.sizes.items()
        if (outcome := _outcomes().get(f"{name}-{size}"))
        and outcome.get("experiment") in (None, key_of(sized.experiment))
    ]


GROUPS = {
    "Theorems and identities, executed": lambda claim, outcome: isinstance(
        claim.sizes[outcome["size"]].experiment, Computed
    ),
    "Reproduced by two protocols": lambda claim, outcome: _agreed(claim, ClaimVerdict.HOLDS) > 1,
    "Contradicted by two protocols": lambda claim, outcome: _agreed(claim, ClaimVerdict.FAILS) > 1,
    "Not established, with one protocol for it": lambda claim, outcome: (
        _verdict(claim, outcome) is ClaimVerdict.HOLDS
    ),
    "Not established, with one protocol against it": lambda claim, outcome: (
        _verdict(claim, outcome) is ClaimVerdict.FAILS
    ),
    "Left open by the spread of seeds or timings": lambda claim, outcome: (
        _verdict(claim, outcome) is ClaimVerdict.OPEN
    ),
    "Not tested at this size": lambda claim, outcome: True,
}
"""Which claims stand together: each in the first group that takes it."""


def _verdict(claim: Claim, outcome: Outcome) -> ClaimVerdict:
    """The verdict of what was measured, by the rules of today: a size that says little of the
    paper's experiment tests nothing."""
    if claim.sizes[outcome["size"]].little:
        return ClaimVerdict.UNTESTED
    return ClaimVerdict(outcome["verdict"])


def _agreed(claim: Claim, verdict: ClaimVerdict) -> int:
    """The protocols of the same statement that come to this verdict, if none comes to another.
    Claims that share one at some size have one there; what tests nothing is none.
    """
    found = {
        outcome.get("experiment") or name: _verdict(other, outcome)
        for name, other, outcome in _measured()
        if (other.paper, other.place, other.statement)
        == (claim.paper, claim.place, claim.statement)
    }
    tested = [one for one in found.values() if one is not ClaimVerdict.UNTESTED]
    return len(tested) if all(one is verdict for one in tested) else 0


def verdicts() -> str:
    groups: dict[str, list[tuple[str, ...]]] = {name: [] for name in GROUPS}
    for name, claim, outcome in _measured():
        group = next(key for key, takes in GROUPS.items() if takes(claim, outcome))
        groups[group].append((_link(name), claim.statement, _parts(outcome)))
    judged = [
        part
        for group, rows in groups.items()
        for part in (
            f"**{group}: {_statements(rows)}**",
            table(("claim", "statement", "parts that hold"), rows) if rows else "None.",
        )
    ]
    return "\n\n".join([_measured_at(), *judged, *_waiting()])


def _measured_at() -> str:
    """The size and commit of all outcomes, and those of other ones."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, _, outcome in _measured():
        found.setdefault((outcome["size"], outcome["commit"][:12]), []).append(f"`{name}`")
    (usual, _), *others = sorted(found.items(), key=lambda item: -len(item[1]))
    said = [f"Size {usual[0]}, commit {_dated(usual[1])}"]
    said += [f"{', '.join(names)}: {size}, {_dated(commit)}" for (size, commit), names in others]
    return "; ".join(said) + "."


def _dated(commit: str) -> str:
    """The commit with its date, by which its protocols were fixed."""
    dates: Outcome = results("reproduce_protocols")["commits"]
    (date,) = {dates[one] for one in dates if one.startswith(commit)}
    return f"{commit} of {date}"


def _link(name: str) -> str:
    return f"[`{name}`](#{name.replace('.', '')})"


def _statements(rows: list[tuple[str, ...]]) -> int:
    """Of how many statements the rows are, which may have several protocols."""
    return len({statement for _, statement, _ in rows})


def _waiting() -> Iterator[str]:
    """Claims without an outcome of their protocol."""
    measured = {name for name, _, _ in _measured()}
    rows = [
        (
            f"`{name}`",
            claim.statement,
            _earlier_verdict(name),
            f"{claim.cpu.minutes:g}",
            claim.cpu.note,
        )
        for name, claim in CLAIMS.items()
        if name not in measured
    ]
    yield f"**Not established, without an outcome of their present protocol: {len(rows)}**"
    columns = ("claim", "statement", "by an earlier protocol", "minutes at size cpu", "which lacks")
    yield table(columns, rows) if rows else "None."


def _earlier_verdict(name: str) -> str:
    """Of a protocol that was replaced, and how many of the parts held."""
    outcome = _outcomes().get(f"{name}-cpu")
    return f"{outcome['verdict']}, {_parts(outcome)}" if outcome else ""


def replaced() -> str:
    """Protocols that were replaced, with their verdicts, those with one reason together."""
    rows: dict[str, list[Outcome]] = {}
    for row in results("reproduce_protocols")["replaced"]:
        rows.setdefault(row["reason"], []).append(row)
    columns = ("measured", "verdicts, parts that held", "why it was replaced")
    shown = (
        (_first_to_last(one["measured"] for one in same), ", ".join(map(_was, same)), reason)
        for reason, same in rows.items()
    )
    return table(columns, shown)


def _first_to_last(dates: Iterable[str]) -> str:
    first, *others = sorted(set(dates))
    return f"{first} to {others[-1]}" if others else first


def _was(row: Outcome) -> str:
    return f"`{row['claim']}` {row['verdict']} ({row['held']} of {row['tested']})"


def _parts(outcome: Outcome) -> str:
    """How many parts hold of those that were tested."""
    tested = len(outcome["checks"]) - outcome["tally"].get("not tested", 0)
    return f"{outcome['tally'].get('holds', 0)} of {tested}" if tested else "none tested"


def sections() -> str:
    return "\n\n".join(part for found in _measured() for part in _section(*found))


def _section(name: str, claim: Claim, outcome: Outcome) -> Iterator[str]:
    size = claim.sizes[outcome["size"]]
    yield f"## {name}"
    said = (f"{claim.paper}, {claim.place}.", claim.remark, size.note, _little(size))
    spent = f"{_updates(size)}{outcome['minutes']:.1f} minutes."
    yield " ".join(filter(None, (*said, spent)))
    yield "\n".join(_checks(outcome["checks"]))
    if numbers := _numbers(claim, outcome):
        yield numbers
    yield f"![{name}](measured/{_picture(name, outcome)})"


def _little(size: ClaimSize) -> str:
    return f"**Not tested at this size: {size.little}.**" if size.little else ""


def _updates(size: ClaimSize) -> str:
    """The updates that every method got."""
    found = size.experiment.updates
    counts = {count: [name for name in found if found[name] == count] for count in found.values()}
    if len(counts) == 1:
        return f"{next(iter(counts)):,} updates for each method. "
    return "".join(f"{count:,} updates: {', '.join(names)}. " for count, names in counts.items())


def _checks(checks: list[Outcome]) -> Iterator[str]:
    """A line for each, or for all that say the same of several models."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for check in checks:
        subject, _, rest = _short(check["sentence"]).partition(" ")
        rows.setdefault((rest, *_judged(check)), []).append(subject)
    for (rest, difference, verdict), subjects in rows.items():
        yield f"- {', '.join(subjects)} {rest}: {difference}, {verdict}"


def _short(sentence: str) -> str:
    """With a place or quantity that both sides have in common said once, behind them."""
    return SHARED_QUANTITY.sub(r"\1 \3 \4\5 (\2)", SHARED_PLACE.sub(r"\1 \3 \4\5 at \2", sentence))


SHARED_PLACE = re.compile(r"^(\S+) at (.+) ([>=]) (\S+) at \2( [-+±] \S+)?$")
SHARED_QUANTITY = re.compile(r"^([^(]+?) \((?P<q>.+)\) ([>=]) ([^(]+?) \((?P=q)\)( [-+±] \S+)?$")


def _judged(check: Outcome) -> tuple[str, str]:
    """The difference with its interval, and the verdict: if it is none, what would have shown."""
    difference, low, high, visible = (
        _number(check[part]) for part in ("difference", "low", "high", "visible")
    )
    limit = f"visible from {visible}" if check["verdict"] == ClaimVerdict.OPEN.value else ""
    verdict = (
        check["verdict"]
        if check["verdict"] == ClaimVerdict.HOLDS.value
        else f"**{check['verdict']}**"
    )
    return (
        difference if low == difference == high else f"{difference} ({low}–{high})",
        ": ".join(filter(None, (verdict, check["reason"], limit))),
    )


def _number(x: float | None) -> str:
    return "∞" if x is None else f"{x:.3g}"


def _numbers(claim: Claim, outcome: Outcome) -> str:
    """What was measured, with its floors, and the paper's numbers where they are others."""
    measures = Measures(Measure(**row) for row in outcome["measures"])
    main, scale = measures.of(""), claim.sizes[outcome["size"]].experiment.scale
    if not main.series:
        return _by_quantity(claim, measures, scale)
    places = {_place(x): x for x in main.places()}
    printed = (x for row in claim.figures.values() for x in row if x.startswith("paper"))
    columns = dict.fromkeys([*places, *printed])
    ours = {s: [_reached(main, s, places.get(x, x)) for x in columns] for s in main.series}
    theirs = {s: _printed(claim.figures.get(s, {}), columns) for s in ours}
    rows = [
        _floors([_floor(measures, places[x], scale) if x in places else None for x in columns]),
        *(row for s in ours for row in _beside(s, ours[s], theirs[s])),
    ]
    rows = [row for row in rows if any(row[1:])]
    return table((claim.unit, *columns), rows) if rows else ""


def _by_quantity(claim: Claim, measures: Measures, scale: Scale | None) -> str:
    """What was measured, with a column for each quantity that the paper prints, beside its
    numbers; for each that was measured where it prints none of them."""
    printed = {name for row in claim.figures.values() for name in row}
    measured = [name for name in measures.quantities if name != FLOOR]
    columns = [name for name in measured if name in printed] or measured
    floors = {row.series for row in measures.of(FLOOR)}
    rows = []
    if scale is not None and scale.quantity in columns:
        rows.append(
            _floors(
                [_floor(measures, None, scale if n == scale.quantity else None) for n in columns]
            )
        )
    for series in measures.series:
        ours = [_reached(measures.of(name), series, None) for name in columns]
        if series not in floors:
            rows += _beside(series, ours, _printed(claim.figures.get(series, {}), columns))
    return table((claim.unit, *columns), rows) if columns else ""


def _beside(series: str, ours: list[str], theirs: list[str]) -> Iterator[list[str]]:
    """A row, and the paper's where it says something else of the same places."""
    apart = not any(a and b for a, b in zip(ours, theirs, strict=True))
    yield [series, *([a or b for a, b in zip(ours, theirs, strict=True)] if apart else ours)]
    if not apart and ours != theirs:
        yield [f"{series}, paper", *theirs]


def _printed(row: Mapping[str, float], columns: Iterable[str]) -> list[str]:
    return [f"{row[x]:g}" if x in row else "" for x in columns]


def _place(x: At) -> str:
    return "" if x is None else str(x)


def _reached(main: Measures, series: str, x: At) -> str:
    """The median and range of a series."""
    sample = main.sample(series, x)
    if sample is None:
        return ""
    median, low, high = (f"{value:.4g}" for value in (sample.median, sample.low, sample.high))
    return median if low == high else f"{median} ({low}–{high})"


def _floor(measures: Measures, x: At, scale: Scale | None) -> tuple[str, str] | None:
    """The highest floor there, and whose it is."""
    floors = {row.value: row.series for row in measures.of(FLOOR) if row.x == x}
    if scale is None or not floors:
        return None
    floor = scale.highest(floors)
    return f"{floor:.3g}", floors[floor]


def _floors(found: list[tuple[str, str] | None]) -> list[str]:
    """The row of floors; whose they are once, if of the same predictor."""
    names = {floor[1] for floor in found if floor}
    if len(names) == 1:
        return [f"floor: {names.pop()}", *(floor[0] if floor else "" for floor in found)]
    return ["floor", *(f"{floor[0]} ({floor[1]})" if floor else "" for floor in found)]


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


PAGE = Page("reproduce", (verdicts, replaced, sections), _pictures())
