"""The pictures of docs/mesa.md."""

from __future__ import annotations

from fastweights.render.plots import PALETTE, canvas, label, legend, logarithmic, png
from pages.mesa_results import MESA, OWN, best_models, losses, measured, spans


def losses_by_position() -> bytes:
    """The losses of all models, and how far each is from MesaNet."""
    columns, rows = losses()
    figure, axes = canvas(1, 2, 5.2, 3.8)
    for number, row in enumerate(best_models(rows)):
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


def cost_of_fewer_steps() -> bytes:
    """Figure 7: what fewer steps, or a tolerance, cost by position."""
    columns, rows = losses()
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


def heads() -> bytes:
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
