"""docs/plan.md: what the papers' trainings take, and what plans say beside what was measured."""

from __future__ import annotations

from itertools import groupby

from fastweights.budget import ACCELERATORS
from fastweights.recipes import RECIPES
from fastweights.render.markdown import table
from fastweights.render.units import bytes_in_words
from pages.page import Page, Row, Stretches, results, rows_of

SETTINGS = ("width", "layers", "batch", "length")


def _rows(part: str) -> list[Row]:
    return rows_of(f"plan/{part}")


def recipes() -> str:
    found: dict[tuple[str, ...], list[str]] = {}
    for name, one in RECIPES.items():
        cells = (
            f"{one.paper}; {one.data.value}",
            f"{one.batch.value:,} × {one.length.value:,}",
            f"{one.hardware.value}; {one.hours.value}",
        )
        found.setdefault(cells, []).append(f"`{name}` ({one.tokens.value / 1e9:g}B)")
    columns = ("recipe (tokens)", "model and data", "batch × length", "published hardware, hours")
    return table(columns, ((", ".join(names), *cells) for cells, names in found.items()))


def costs() -> str:
    priced = _prices()
    columns, lines = ("recipe", "devices", *priced), []
    for name, rows in groupby(_rows("costs"), lambda row: row["recipe"]):
        found = {row["device"]: row for row in rows}
        count = next(iter(found.values()))["devices"]
        lines.append((f"`{name}`", f"{count}", *(_cost(found[device]) for device in priced)))
    return table(columns, lines)


def _cost(row: Row) -> str:
    if row["hours"] is None:
        return "does not fit"
    ways = "".join(mark for mark, name in (("S", "shard"), ("R", "recompute")) if row[name])
    size = bytes_in_words(row["memory"])
    return f"{row['hours']:,.3g} h, {size}" + (f" ({ways})" if ways else "")


def _prices() -> dict[str, float]:
    return results("plan/costs")["header"]["settings"]["prices"]


def prices() -> str:
    return "Prices of a device for an hour, assumed: " + ", ".join(
        f"{name} ${price:g}" for name, price in _prices().items()
    )


def devices() -> str:
    columns = ("device", "memory", "bf16, TFLOP/s", "float32", "memory, TB/s", "source")
    lines = (
        (
            f"`{name}`",
            bytes_in_words(one.memory),
            f"{one.bf16 / 1e12:g}",
            f"{one.float32 / 1e12:g}",
            f"{one.bandwidth / 1e12:.3g}",
            one.source,
        )
        for name, one in ACCELERATORS.items()
    )
    return table(columns, lines)


def memory() -> str:
    columns = ("mixer", "sizes", "besides", "planned, MB", "given back", "resident")
    return table(columns, map(_memory_line, _rows("memory")))


def _memory_line(row: Row) -> tuple[str, ...]:
    besides = [name for name in ("bf16", "recompute") if row[name]]
    besides += [f"in {row['accumulate']} parts"] if row["accumulate"] > 1 else []
    sizes = [row[name] for name in ("planned", "given_back", "resident")]
    return (
        row["mixer"],
        _sizes(row),
        ", ".join(besides),
        *("" if size is None else f"{size / 1e6:,.0f}" for size in sizes),
    )


def _sizes(row: Row) -> str:
    """Width, layers, batch and length."""
    return "·".join(f"{row[name]}" for name in SETTINGS)


def operations() -> str:
    columns = ("mixer", "forward: planned / counted", "ratio", "backward", "ratio")
    return table(columns, map(_operations_line, _rows("operations")))


def _operations_line(row: Row) -> tuple[str, ...]:
    forward = row["planned_products"] + row["planned_recurrent"]
    both = ((forward, row["forward"]), (row["planned_backward"], row["backward"]))
    cells = ((f"{p / 1e6:.3f}M / {c / 1e6:.3f}M", f"{p / c:.2f}") for p, c in both)
    return (row["mixer"], *(text for pair in cells for text in pair))


def times() -> str:
    columns = ("mixer", "sizes", "measured, s", "predicted, s", "quotient")
    lines = (
        (
            row["mixer"],
            _sizes(row),
            f"{row['seconds']:.2f}",
            f"{row['predicted']:.2f}",
            f"{row['predicted'] / row['seconds']:.2f}",
        )
        for row in _rows("times")
    )
    return table(columns, lines)


PAGE = Page(
    "plan",
    Stretches(
        {
            "recipes": recipes,
            "devices": devices,
            "costs": costs,
            "prices": prices,
            "memory": memory,
            "operations": operations,
            "times": times,
        }
    ),
)
