"""docs/gpu-static.md: what kernels take of GPUs that none has run on.

The results are static.json, which ``python -m static`` in benchmarks/ writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend_beside, png
from pages.page import Page, Row, origin, results, rows_of, table_of

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
PHASES = ("forward", "backward")
SIZES = "b8 t4096 h16 k128 v128 bfloat16"


def _gpus() -> dict[str, Row]:
    return results("static")["header"]["settings"]["gpus"]


def _phases(**where: str) -> list[Row]:
    return rows_of("static", type="PhaseRow", **where)


def _ms(seconds: float | None) -> str:
    """Of a limit that was not computed, a dash."""
    return "—" if seconds is None else f"{1e3 * seconds:.3f}"


def measured() -> str:
    return f"{origin('static')}."


def rates() -> str:
    columns = {
        "GPU": lambda gpu: gpu["name"],
        "memory, TB/s": lambda gpu: f"{gpu['bandwidth'] / 1e12:.2f}",
        "16-bit products, TFLOP/s": lambda gpu: f"{gpu['half_products'] / 1e12:.0f}",
        "tf32": lambda gpu: f"{gpu['tf32_products'] / 1e12:.0f}",
        "exponentials, 10¹²/s": lambda gpu: f"{gpu['special'] / 1e12:.1f}",
        "instructions of warps, 10¹²/s": lambda gpu: f"{gpu['issue'] / 1e12:.2f}",
    }
    return table_of([{**gpu, "name": name} for name, gpu in _gpus().items()], columns)


def operations() -> str:
    """Per problem and GPU, forward / backward: the sum of its launches' floors, and that over its
    roofline.
    """
    gpus = list(_gpus())
    found = {(row["problem"], row["phase"], row["gpu"]): row for row in _phases()}

    def cell(problem: str, gpu: str) -> str:
        rows = [found[problem, phase, gpu] for phase in PHASES]
        floors = " / ".join(_ms(row["floor"]) for row in rows)
        over = " / ".join(f"{row['floor'] / row['roofline']:.1f}" for row in rows)
        return f"{floors} ({over})"

    problems = dict.fromkeys(problem for problem, _, _ in found)
    lines = ((_name(problem), *(cell(problem, gpu) for gpu in gpus)) for problem in problems)
    return table(("operation", *gpus), lines)


def _name(problem: str) -> str:
    """Without the sizes, which all have in common."""
    return problem.removesuffix(f" {SIZES}")


def limits() -> str:
    """Per problem and phase, on one GPU: what each limit alone would take in all launches."""
    columns = ("operation", "", *(f"{name}, ms" for name in LIMITS.values()), "floor")
    rows = _phases(gpu=SHOWN)
    lines = (
        (_name(row["problem"]), row["phase"], *(_ms(row[name]) for name in (*LIMITS, "floor")))
        for row in rows
    )
    return table(columns, lines)


def spills() -> str:
    """The kernels that keep registers in memory, on every GPU."""
    found = dict.fromkeys(
        (_name(row["problem"]), f"`{row['kernel']}`", row["gpu"], f"{row['spills']} B")
        for row in rows_of("static", type="LaunchRow")
        if row["spills"]
    )
    return table(("operation", "kernel", "GPU", "spilled"), found)


def compilation() -> str:
    """Seconds until the first results of an operation."""
    rows = {(row["problem"], row["phase"]): row for row in _phases(gpu=SHOWN)}
    lines = (
        (_name(problem), *(f"{rows[problem, phase]['compilation']:.1f} s" for phase in PHASES))
        for problem in dict.fromkeys(problem for problem, _ in rows)
    )
    return table(("operation", *PHASES), lines)


def floors() -> bytes:
    """The floors of all operations over their rooflines, on one GPU."""
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
    panel.set_yticks(places, [row["problem"].removesuffix(" bfloat16") for row in rows])
    panel.invert_yaxis()


PAGE = Page(
    "gpu-static",
    (measured, rates, operations, limits, spills, compilation),
    {"gpu-floors.png": floors},
)
