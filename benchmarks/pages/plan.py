"""docs/plan.md: what the papers' trainings take, and what plans say beside what was measured."""

from __future__ import annotations

from itertools import groupby

from fastweights.budget import ACCELERATORS
from fastweights.recipes import ROWS, TableRow
from fastweights.render.markdown import table
from fastweights.render.units import bytes_in_words, significant
from pages.page import Page, Row, results, rows_of, table_of

SETTINGS = ("width", "layers", "batch", "length")


def _rows(part: str) -> list[Row]:
    return rows_of(f"plan/{part}")


def recipes() -> str:
    columns = ("table", "rows", "by a recipe", "by another command", "by none: why")
    tables = groupby(ROWS, lambda row: row.table)
    return table(columns, (_counted(name, list(rows)) for name, rows in tables))


def _counted(name: str, rows: list[TableRow]) -> tuple[str, ...]:
    by_recipe = sum(bool(row.recipe) for row in rows)
    others = sum(row.starts for row in rows) - by_recipe
    reasons = dict.fromkeys(row.otherwise for row in rows if not row.starts)
    left = len(rows) - by_recipe - others
    why = f"{left}: {'; '.join(reasons)}" if left else ""
    return name, f"{len(rows)}", f"{by_recipe or ''}", f"{others or ''}", why


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
    return f"{significant(row['hours'], 3)} h, {size}" + (f" ({ways})" if ways else "")


def _prices() -> dict[str, float]:
    return results("plan/costs")["header"]["settings"]["prices"]


def prices() -> str:
    return "Prices of a device for an hour, assumed: " + ", ".join(
        f"{name} ${price:g}" for name, price in _prices().items()
    )


def devices() -> str:
    columns = {
        "device": lambda one: f"`{one.name}`",
        "memory": lambda one: bytes_in_words(one.memory),
        "bf16, TFLOP/s": lambda one: f"{one.bf16 / 1e12:g}",
        "float32": lambda one: f"{one.float32 / 1e12:g}",
        "memory, TB/s": lambda one: f"{one.bandwidth / 1e12:.3g}",
        "source": lambda one: one.source,
    }
    return table_of(ACCELERATORS.values(), columns)


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
    columns = {
        "mixer": lambda row: row["mixer"],
        "sizes": _sizes,
        "measured, s": lambda row: f"{row['seconds']:.2f}",
        "predicted, s": lambda row: f"{row['predicted']:.2f}",
        "quotient": lambda row: f"{row['predicted'] / row['seconds']:.2f}",
    }
    return table_of(_rows("times"), columns)


PAGE = Page("plan", (recipes, devices, costs, prices, memory, operations, times))
