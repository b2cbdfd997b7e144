"""Put docs/measured/mesa_*.json into docs/mesa.md as tables and pictures: ``python
benchmarks/mesa/page.py``.

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``; what is between them is written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastweights.render.plots import PALETTE, canvas, label, legend, logarithmic, png

DOCS = Path(__file__).parents[2] / "docs"
PAGE, MEASURED = DOCS / "mesa.md", DOCS / "measured"
MESA, OWN = "mesa", "30 steps"
Row = dict[str, Any]
Cells = Iterable[str]


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))
    for name, draw in PICTURES.items():
        (MEASURED / f"mesa_{name}.png").write_bytes(draw())


def rendered(page: str) -> str:
    """The page with the tables that the measurements say."""

    def filled(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", filled, page, flags=re.DOTALL)


def measured(name: str) -> dict[str, Any]:
    return json.loads((MEASURED / f"mesa_{name}.json").read_text())


def table(head: Cells, rows: Iterable[Cells]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spans(positions: list[int]) -> list[str]:
    return [f"{first}-{last - 1}" for first, last in pairwise(positions)]


# loss ---------------------------------------------------------------------------------------------
# ------------------


def _read() -> tuple[list[str], list[Row]]:
    found = measured("text")
    return spans(found["positions"]), found["rows"]


def _own(row: Row) -> bool:
    """Whether the model was read with its own solver."""
    return row["solver"] in (None, OWN)


def _best(rows: list[Row]) -> list[Row]:
    """Of every model the learning rate with the lowest loss, best model first."""
    names = dict.fromkeys(row["model"] for row in rows)
    best = [min((r for r in rows if r["model"] == name), key=lambda r: r["nats"]) for name in names]
    return sorted(best, key=lambda row: row["nats"])


def _models(rows: list[Row]) -> list[Row]:
    return _best([row for row in rows if _own(row) and not row["model"].startswith("mesa, ")])


def models() -> str:
    columns, rows = _read()
    least = [min(row["by_position"][n] for row in _models(rows)) for n in range(len(columns))]

    def cells(row: Row) -> Iterator[str]:
        yield from (row["model"], f"{row['lr']:g}", f"{row['nats']:.3f}")
        for value, best in zip(row["by_position"], least, strict=True):
            yield f"**{value:.3f}**" if value == best else f"{value:.3f}"

    return table(["model", "lr", "all", *columns], map(cells, _models(rows)))


def beside_mesa() -> str:
    columns, rows = _read()

    def cells(row: Row) -> Iterator[str]:
        yield row["model"]
        for value, error in zip(row["from_mesa"], row["error"], strict=True):
            yield f"{value:+.3f} ± {error:.3f}"

    return table(["model", *columns], (cells(row) for row in _models(rows) if row["model"] != MESA))


def starts() -> str:
    _, rows = _read()
    return _by_solver(
        [MESA, *dict.fromkeys(row["model"] for row in rows if "b_γ" in row["model"])], rows
    )


def random_steps() -> str:
    return _by_solver([MESA, "mesa, random steps"], _read()[1])


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


FIXED = [f"{n} steps" for n in (0, 1, 2, 5, 10, 20, 30)]


def _long(name: str) -> str:
    return {MESA: "mesa, b_γ = 4, 30 steps"}.get(name, name)


def solvers() -> str:
    """With the steps and times of `fastweights bench mesa --checkpoint`."""
    columns, rows = _read()
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


# inside -------------------------------------------------------------------------------------------
# ------------------


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


# speed --------------------------------------------------------------------------------------------
# ------------------


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


# pictures -----------------------------------------------------------------------------------------
# ------------------


def by_position_picture() -> bytes:
    """The losses of all models, and how far each is from MesaNet."""
    columns, rows = _read()
    figure, axes = canvas(1, 2, 5.2, 3.8)
    for number, row in enumerate(_models(rows)):
        color = PALETTE[number % len(PALETTE)]
        style = {
            "color": color,
            "marker": "o",
            "markersize": 3,
            "linestyle": "-" if number < len(PALETTE) else "--",
        }
        axes[0, 0].plot(columns, row["by_position"], label=row["model"], **style)
        axes[0, 1].errorbar(columns, row["from_mesa"], yerr=row["error"], capsize=2, **style)
    label(axes[0, 0], "Loss by token position", "position", "nats per token")
    label(
        axes[0, 1],
        "Less that of MesaNet on the same tokens",
        "position",
        "nats per token, ± standard error",
    )
    legend(axes[0, 0])
    return png(figure)


def steps_picture() -> bytes:
    """Figure 7: what fewer steps, or a tolerance, cost by position."""
    columns, rows = _read()
    of_mesa = [row for row in rows if row["model"] == MESA]
    exact = next(row for row in of_mesa if row["solver"] == OWN)["by_position"]
    taken = {row["contender"]: row["steps"] for row in measured("loss")["rows"]}
    figure, axes = canvas(1, 2, 5.2, 3.6)
    for one, kind, title in (
        (axes[0, 0], "steps", "Fixed steps"),
        (axes[0, 1], "tol", "Stopped at a tolerance"),
    ):
        chosen = [row for row in of_mesa if kind in row["solver"] and row["solver"] != OWN]
        for color, row in zip(PALETTE, chosen, strict=False):
            extra = [value - least for value, least in zip(row["by_position"], exact, strict=True)]
            mean = f" ({taken[row['solver']]:.1f} steps)" if kind == "tol" else ""
            one.plot(
                columns, extra, marker="o", markersize=3, color=color, label=row["solver"] + mean
            )
        label(one, title, "position", "nats above 30 steps")
        legend(one)
    return png(figure)


def heads_picture() -> bytes:
    """Figure 13: gates by head, and condition number, steps and cosine by position; heads in the
    order of their γ.
    """
    found = measured("inside")
    heads, columns = (
        sorted(found["heads"], key=lambda head: head["gamma"]),
        spans(found["positions"]),
    )
    figure, axes = canvas(1, 4, 3.6, 3.4)
    for (name, symbol), color in zip(
        {"gamma": "γ", "beta": "β", "ridge": "Λ"}.items(), PALETTE, strict=False
    ):
        axes[0, 0].plot([head[name] for head in heads], ".-", color=color, label=symbol)
    label(axes[0, 0], "Gates and Λ by head, in the order of γ", "head", "mean")
    legend(axes[0, 0])
    low, high = heads[0]["gamma"], heads[-1]["gamma"]
    parts = (
        ("condition", "Condition number of H + Λ"),
        ("steps", "Steps to 1e-3"),
        ("cosine", "Cosine with no step"),
    )
    for one, (key, title) in zip(axes[0, 1:], parts, strict=True):
        for number, head in enumerate(heads):
            shade = number / max(1, len(heads) - 1)
            one.plot(columns, head[key], color=(0.9 * shade, 0.2, 0.9 * (1 - shade)), linewidth=1)
        label(one, title, f"position; blue to red: γ from {low:.2f} to {high:.3f}", "")
        one.tick_params(axis="x", rotation=45)
    logarithmic(axes[0, 1])
    return png(figure)


TABLES: dict[str, Callable[[], str]] = {
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
PICTURES: dict[str, Callable[[], bytes]] = {
    "text": by_position_picture,
    "steps": steps_picture,
    "heads": heads_picture,
}

if __name__ == "__main__":
    main()
