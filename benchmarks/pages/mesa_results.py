"""What was measured of MesaNet: benchmarks/results/mesa_*.json."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pages.page import Row, results

MESA, OWN = "mesa", "30 steps"


def measured(name: str) -> dict[str, Any]:
    return results(f"mesa_{name}")


def spans(positions: list[int]) -> list[str]:
    return [f"{first}-{last - 1}" for first, last in pairwise(positions)]


def losses() -> tuple[list[str], list[Row]]:
    """(the spans of positions, a row for each model, learning rate and solver)."""
    found = measured("text")
    return spans(found["positions"]), found["rows"]


def best_models(rows: list[Row]) -> list[Row]:
    """Of every model, read with its own solver, the learning rate with the lowest loss; best model
    first.
    """
    own = [
        row
        for row in rows
        if row["solver"] in (None, OWN) and not row["model"].startswith("mesa, ")
    ]
    names = dict.fromkeys(row["model"] for row in own)
    best = [min((r for r in own if r["model"] == name), key=lambda r: r["nats"]) for name in names]
    return sorted(best, key=lambda row: row["nats"])
