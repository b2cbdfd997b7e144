"""docs/serving.md: weights of bytes beside float32."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, origin, results, rows_of

ACTS = ("token", "token, batch of 8", "prefill")


def quantized() -> str:
    """With what it was measured."""
    return f"{origin('quantized')}."


def _ways() -> list[str]:
    return results("quantized")["header"]["settings"]["ways"]


def perplexity() -> str:
    lines = (
        (row["name"], *(f"{row[way]:.4f}" for way in _ways()))
        for row in rows_of("quantized", part="trained")
    )
    return table(("perplexity per byte", *_ways()), lines)


def speed() -> str:
    columns = ("model", "way", "MB", *(f"{act}, ms" for act in ACTS))
    lines = (
        (
            row["name"],
            way,
            f"{row['bytes'][way] / 1e6:,.0f}",
            *(_time(row[act], way) for act in ACTS),
        )
        for row in rows_of("quantized", part="speed")
        for way in _ways()
    )
    return table(columns, lines)


def _time(times: Row, way: str) -> str:
    """And how many times faster than float32."""
    return f"{times[way]:,.1f} ({times['float32'] / times[way]:.2f}×)"


PAGE = Page("serving", (quantized, perplexity, speed))
