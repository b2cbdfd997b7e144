"""docs/serving.md: weights of bytes beside float32."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, Stretches, results

ACTS = ("token", "token, batch of 8", "prefill")


def quantized() -> str:
    """With what it was measured."""
    found = results("quantized")
    with_ = found["versions"]
    return (
        f"Commit `{found['commit'][:8]}`, {found['machine']['cpu']}, one thread, torch"
        f" {with_['torch']}, transformers {with_['transformers']}."
    )


def perplexity() -> str:
    ways = results("quantized")["ways"]
    lines = (
        (name, *(f"{row[way]:.4f}" for way in ways))
        for name, row in results("quantized")["trained"].items()
    )
    return table(("perplexity per byte", *ways), lines)


def speed() -> str:
    ways = results("quantized")["ways"]
    columns = ("model", "way", "MB", *(f"{act}, ms" for act in ACTS))
    lines = (
        (name, way, f"{row['bytes'][way] / 1e6:,.0f}", *(_time(row[act], way) for act in ACTS))
        for name, row in results("quantized")["speed"].items()
        for way in ways
    )
    return table(columns, lines)


def _time(times: Row, way: str) -> str:
    """And how many times faster than float32."""
    return f"{times[way]:,.1f} ({times['float32'] / times[way]:.2f}×)"


PAGE = Page(
    "serving", Stretches({"quantized": quantized, "perplexity": perplexity, "speed": speed})
)
