"""docs/batch-invariance.md: what it costs, and what differs without it."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, Stretches, results


def _models() -> dict[str, Row]:
    return results("batch_invariance")["models"]


def machine() -> str:
    found = results("batch_invariance")
    with_ = found["versions"]
    return (
        f"Commit `{found['commit'][:8]}`, {found['machine']['cpu']}, one thread, torch"
        f" {with_['torch']}, transformers {with_['transformers']}."
    )


def costs() -> str:
    """Milliseconds outside and inside, and their ratio."""
    acts = [name for name in next(iter(_models().values())) if name != "differences"]
    lines = ((name, *(_cost(row[act]) for act in acts)) for name, row in _models().items())
    return table(("model", *(f"{act}, ms" for act in acts)), lines)


def _cost(times: Row) -> str:
    return f"{times['outside']:,.0f} → {times['inside']:,.0f} ({times['ratio']:.0f}×)"


def differences() -> str:
    lines = (
        (name, *(f"{row['differences'][pair]:.0e}" for pair in ("batch", "decoded", "inside")))
        for name, row in _models().items()
    )
    columns = ("model", "batch against single", "at once against decoded", "either, inside")
    return table(columns, lines)


PAGE = Page(
    "batch-invariance",
    Stretches({"machine": machine, "costs": costs, "differences": differences}),
)
