"""docs/gpu-static.md: what kernels take of GPUs that none has run on.

The results are static.json, which ``python -m static`` in benchmarks/ writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend_beside, png
from pages.page import Page, Row, Stretches, origin, results, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = "H200"
"""The GPU whose launches are shown in full."""

LIMITS = {
    "memory": "memory",
    "products": "products",
    "special": "exponentials",
    "issue": "issue",
}
GOAL, MESA_GOAL = 2.5, 3.0
"""The most that the sum of an operation's floors may be of its roofline."""

PHASES = ("forward", "backward")


def _gpus() -> dict[str, Row]:
    return results("static")["header"]["settings"]["gpus"]


def _phases(**where: str) -> list[Row]:
    return rows_of("static", type="PhaseRow", **where)


def _launch_rows(**where: str) -> list[Row]:
    return rows_of("static", type="LaunchRow", **where)


def _goal(problem: str) -> float:
    return MESA_GOAL if problem.startswith("mesa") else GOAL


def _ms(seconds: float | None) -> str:
    """Of a limit that was not computed, a dash."""
    return "—" if seconds is None else f"{1e3 * seconds:.3f}"


def measured() -> str:
    return f"{origin('static')}."


def rates() -> str:
    columns = (
        *("GPU", "memory, TB/s", "16-bit products, TFLOP/s", "tf32", "exponentials, 10¹²/s"),
        "instructions of warps, 10¹²/s",
    )
    lines = (
        (
            name,
            f"{gpu['bandwidth'] / 1e12:.2f}",
            f"{gpu['half_products'] / 1e12:.0f}",
            f"{gpu['tf32_products'] / 1e12:.0f}",
            f"{gpu['special'] / 1e12:.1f}",
            f"{gpu['issue'] / 1e12:.2f}",
        )
        for name, gpu in _gpus().items()
    )
    return table(columns, lines)


def operations() -> str:
    """Per problem and phase, and per GPU: the sum of its launches' floors over its roofline."""
    gpus = list(_gpus())
    columns = ("operation", "", "launches", *(f"{gpu}: floor / roofline, ms" for gpu in gpus))
    return table(columns, _operation_lines(gpus))


def _operation_lines(gpus: list[str]) -> Iterator[tuple[str, ...]]:
    found = {(row["problem"], row["phase"], row["gpu"]): row for row in _phases()}
    for problem, phase in dict.fromkeys((problem, phase) for problem, phase, _ in found):
        rows = [found[problem, phase, gpu] for gpu in gpus]
        shown = (
            f"{_ms(row['floor'])} / {_ms(row['roofline'])} ="
            f" {row['floor'] / row['roofline']:.1f} [{_goal(problem):g}]"
            for row in rows
        )
        yield problem, phase, str(rows[0]["launches"]), *shown


def limits() -> str:
    """Per problem and phase, on one GPU: what each limit alone would take in all launches."""
    columns = ("operation", "", *(f"{name}, ms" for name in LIMITS.values()), "floor")
    rows = _phases(gpu=SHOWN)
    lines = (
        (row["problem"], row["phase"], *(_ms(row[name]) for name in (*LIMITS, "floor")))
        for row in rows
    )
    return table(columns, lines)


def launches() -> str:
    """All launches on one GPU: what each moves and computes, and what binds it."""
    rows = _launch_rows(gpu=SHOWN)
    return "\n\n".join(
        f"### {problem}\n\n{_launches(list(found))}"
        for problem, found in groupby(rows, lambda row: row["problem"])
    )


def _launches(rows: list[Row]) -> str:
    columns = (
        "",
        "kernel",
        "programs",
        "waves",
        "MB moved",
        "touched",
        "GFLOP",
        "10⁶ exponentials",
        "10⁶ instr.",
        "memory, ms",
        "products",
        "exponentials",
        "issue",
        "bound by",
    )
    return table(columns, map(_launch, rows))


def _launch(row: Row) -> tuple[str, ...]:
    bound = max(LIMITS, key=lambda name: row[name] or 0.0)
    return (
        row["phase"],
        f"`{row['kernel']}`",
        " × ".join(str(n) for n in row["grid"] if n > 1) or "1",
        f"{row['waves']:.1f}",
        f"{row['moved'] / 1e6:.0f}",
        f"{row['touched'] / 1e6:.0f}",
        f"{row['flops'] / 1e9:.1f}",
        f"{row['specials'] / 1e6:.0f}",
        "—" if row["issued"] is None else f"{row['issued'] / 1e6:.0f}",
        *(_ms(row[name]) for name in LIMITS),
        LIMITS[bound],
    )


def resources() -> str:
    """What each kernel takes of a multiprocessor, on every GPU."""
    gpus = list(_gpus())
    columns = ("operation", "kernel", *gpus)
    return table(columns, _resource_lines(gpus))


def _resource_lines(gpus: list[str]) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in _launch_rows():
        by_gpu = found.setdefault((row["problem"], row["kernel"]), {})
        by_gpu.setdefault(row["gpu"], []).append(row)
    for (problem, kernel), by_gpu in found.items():
        yield problem, f"`{kernel}`", *("; ".join(_distinct(by_gpu[gpu])) for gpu in gpus)


def _distinct(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(map(_resources, rows)))


def _resources(row: Row) -> str:
    spills = f", **spills {row['spills']} B**" if row["spills"] else ""
    return (
        f"{row['registers']} × {32 * row['warps']}, {row['shared_memory'] / 1024:.0f} kB,"
        f" {row['blocks']} blocks, {row['instructions']} instr.{spills}"
    )


def compilation() -> str:
    """Seconds until the first results of an operation."""
    rows = {(row["problem"], row["phase"]): row for row in _phases() if row["gpu"] == SHOWN}
    lines = (
        (problem, *(f"{rows[problem, phase]['compilation']:.1f} s" for phase in PHASES))
        for problem in dict.fromkeys(problem for problem, _ in rows)
    )
    return table(("operation", *PHASES), lines)


def floors() -> bytes:
    """The floors of all operations over their rooflines, and the goals, on one GPU."""
    rows = _phases(gpu=SHOWN)
    names = list(dict.fromkeys(row["problem"] for row in rows))
    figure, axes = canvas(1, 2, 5.6, 0.26 * len(names) + 1.0)
    for panel, phase in zip(axes[0], PHASES, strict=True):
        chosen = {row["problem"]: row for row in rows if row["phase"] == phase}
        _draw(panel, [chosen[name] for name in names])
        label(panel, phase, "floor of the kernels over roofline of the operation", "")
    axes[0, 1].set_yticklabels([])
    legend_beside(axes[0, 1])
    return png(figure)


def _draw(panel: Axes, rows: list[Row]) -> None:
    places = range(len(rows))
    ratios = [row["floor"] / row["roofline"] for row in rows]
    panel.barh(places, ratios, color=PALETTE[0], height=0.6, label="computed")
    panel.plot(
        [_goal(row["problem"]) for row in rows],
        places,
        linestyle="",
        marker="|",
        markersize=11,
        markeredgewidth=2.5,
        color=PALETTE[1],
        label="goal, at most",
    )
    panel.set_yticks(places, [row["problem"].removesuffix(" bfloat16") for row in rows])
    panel.invert_yaxis()


PAGE = Page(
    "gpu-static",
    Stretches(
        {
            "origin": measured,
            "rates": rates,
            "operations": operations,
            "limits": limits,
            "launches": launches,
            "resources": resources,
            "compilation": compilation,
        }
    ),
    {"gpu-floors.png": floors},
)
