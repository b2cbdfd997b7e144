"""docs/mesa.md: what solving for the optimal fast weights takes and brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from fastweights.render.markdown import table
from pages import mesa_pictures
from pages.mesa_results import MESA, OWN, best_models, losses, measured
from pages.page import Page, Row, Stretches

Cells = Iterable[str]
FIXED = [f"{n} steps" for n in (0, 1, 2, 5, 10, 20, 30)]


def models() -> str:
    columns, rows = losses()
    least = [min(row["by_position"][n] for row in best_models(rows)) for n in range(len(columns))]

    def cells(row: Row) -> Iterator[str]:
        yield from (row["model"], f"{row['lr']:g}", f"{row['nats']:.3f}")
        for value, best in zip(row["by_position"], least, strict=True):
            yield f"**{value:.3f}**" if value == best else f"{value:.3f}"

    return table(["model", "lr", "all", *columns], map(cells, best_models(rows)))


def beside_mesa() -> str:
    columns, rows = losses()

    def cells(row: Row) -> Iterator[str]:
        yield row["model"]
        for value, error in zip(row["from_mesa"], row["error"], strict=True):
            yield f"{value:+.3f} ± {error:.3f}"

    others = [row for row in best_models(rows) if row["model"] != MESA]
    return table(["model", *columns], map(cells, others))


def starts() -> str:
    _, rows = losses()
    return _by_solver(
        [MESA, *dict.fromkeys(row["model"] for row in rows if "b_γ" in row["model"])], rows
    )


def random_steps() -> str:
    return _by_solver([MESA, "mesa, random steps"], losses()[1])


def _by_solver(names: list[str], rows: list[Row]) -> str:
    lines = []
    for name in names:
        of = [
            row for row in rows if row["model"] == name and (row["solver"] or "").endswith("steps")
        ]
        if not of:
            continue
        by = {row["solver"]: row["nats"] for row in of if row["lr"] == max(r["lr"] for r in of)}
        lines.append([_long(name), *(f"{by[s]:.4f}" if s in by else "" for s in FIXED)])
    return table(["trained", *FIXED], lines)


def _long(name: str) -> str:
    return {MESA: "mesa, b_γ = 4, 30 steps"}.get(name, name)


def solvers() -> str:
    """With the steps and times of `fastweights bench mesa --checkpoint`."""
    columns, rows = losses()
    taken = {row["contender"]: row for row in measured("loss")["rows"]}
    own = next(row for row in rows if row["model"] == MESA and row["solver"] == OWN)

    def cells(row: Row) -> Iterator[str]:
        of = taken.get(row["solver"])
        yield from (row["solver"], f"{row['nats']:.4f}")
        for value, exact in zip(row["by_position"], own["by_position"], strict=True):
            yield f"{value - exact:+.4f}"
        yield f"{of['steps']:.1f}" if of else "0.0"
        yield f"{of['over']:.2f}" if of else ""
        yield f"{of['tokens_per_second'] / taken[OWN]['tokens_per_second']:.2f}" if of else ""

    of_mesa = [row for row in rows if row["model"] == MESA and row["lr"] == own["lr"]]
    head = ["solver", "nats", *columns, "steps", "time of prefill", "tokens/s decoded"]
    return table(head, map(cells, of_mesa))


def warm_starts() -> str:
    rows = measured("inside")["warm"]
    names, tolerances = (list(dict.fromkeys(row[key] for row in rows)) for key in ("start", "tol"))

    def mean(key: str, **where: Any) -> float:
        found = [row[key] for row in rows if all(row[k] == v for k, v in where.items())]
        return sum(found) / len(found)

    lines = (
        [
            name,
            f"{mean('residual', start=name):.2f}",
            *(f"{mean('steps', start=name, tol=t):.2f}" for t in tolerances),
        ]
        for name in names
    )
    return table(
        ["start", "its residual / Jacobi's", *(f"steps to {t:g}" for t in tolerances)], lines
    )


def least_squares() -> str:
    """Fallbacks on the model's streams, by the mean γ of the head."""
    rows = measured("inside")["least_squares"]
    tolerances = list(dict.fromkeys(row["tol"] for row in rows))
    edges = (0.0, 0.9, 0.97, 0.985, 1.0)
    lines = []
    for low, high in pairwise(edges):
        inside = [row for row in rows if low <= row["gamma"] < high]
        parts = [[row["fallbacks"] for row in inside if row["tol"] == tol] for tol in tolerances]
        lines.append(
            [
                f"{low:g}-{high:g}",
                str(len(parts[0])),
                *(f"{100 * sum(p) / len(p):.0f} %" for p in parts if p),
            ]
        )
    return table(
        ["mean γ of the head", "heads", *(f"fallbacks at tol {t:g}" for t in tolerances)], lines
    )


def _ms(row: Row) -> str:
    return f"{1e3 * row['seconds']['median']:.3g} ms" if row["seconds"] else row["note"]


def _some(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def lengths() -> str:
    rows = [row for row in measured("speed")["rows"] if row["type"] == "LengthRow"]

    def cells(row: Row) -> Cells:
        memory = None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6
        numbers = (
            _some(row["over_gla"], "{:.1f}"),
            _some(row["steps"], "{:.1f}"),
            _some(row["over_gla_per_step"], "{:.2f}"),
        )
        return (
            str(row["length"]),
            row["phase"],
            row["contender"],
            _ms(row),
            *numbers,
            _some(memory, "{:.0f} MB"),
        )

    return table(["T", "", "", "time", "/ GLA", "steps", "per step", "memory"], map(cells, rows))


def chunks() -> str:
    rows = [row for row in measured("speed")["rows"] if row["type"] == "ChunkRow"]
    phases = list(dict.fromkeys(row["group"].split()[-1] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))

    def over(name: str, phase: str) -> str:
        return next(
            f"{r['over']:.2f}"
            for r in rows
            if r["contender"] == name and r["group"].endswith(" " + phase)
        )

    return table(
        ["", *phases], ([name, *(over(name, phase) for phase in phases)] for name in names)
    )


def decoding() -> str:
    rows = [row for row in measured("speed")["rows"] if row["type"] == "DecodeRow"]

    def cells(row: Row) -> Cells:
        batch = row["group"].split()[1]
        numbers = (
            _some(row["over"], "{:.2f}"),
            _some(row["fallbacks"], "{:.0%}"),
            _some(row["error"], "{:.0e}"),
        )
        micro = f"{1e6 * row['seconds']['median']:.0f} µs" if row["seconds"] else row["note"]
        return batch, f"{row['gamma']:g}", row["contender"], micro, *numbers

    return table(
        ["", "γ", "solver", "a token", "/ tol 1e-4", "fallbacks", "error"], map(cells, rows)
    )


def parity() -> str:
    rows = measured("parity")["rows"]
    lengths_read = list(rows[0]["accuracy"])
    lines = (
        [row["gate"], str(row["seed"]), *(f"{row['accuracy'][n]:.3f}" for n in lengths_read)]
        for row in sorted(rows, key=lambda row: (row["gate"], row["seed"]))
    )
    return table(["gate", "seed", *(f"length {n}" for n in lengths_read)], lines)


PAGE = Page(
    "mesa",
    Stretches(
        {
            "models": models,
            "beside_mesa": beside_mesa,
            "starts": starts,
            "random_steps": random_steps,
            "solvers": solvers,
            "warm_starts": warm_starts,
            "least_squares": least_squares,
            "lengths": lengths,
            "chunks": chunks,
            "decoding": decoding,
            "parity": parity,
        }
    ),
    {
        "mesa_text.png": mesa_pictures.losses_by_position,
        "mesa_steps.png": mesa_pictures.cost_of_fewer_steps,
        "mesa_heads.png": mesa_pictures.heads,
    },
)
