"""docs/vllm.md: vLLM's server with a softmax Llama and with the same model linearized."""

from __future__ import annotations

import statistics
from typing import Any

from fastweights.render.markdown import table
from fastweights.render.units import bytes_in_words
from pages.page import Page, Row, rows_of

MODELS = ("softmax", "linearized")
COLUMNS = (
    "prompt",
    "streams",
    "model",
    "requests/s",
    "first token, s",
    "token, ms",
    "cache in use",
    "server",
)


def serving() -> str:
    rows = rows_of("vllm_serving")
    loads = list(dict.fromkeys((row["prompt"], row["streams"]) for row in rows))
    return table(COLUMNS, (_line(rows, *load, model) for load in loads for model in MODELS))


def _line(rows: list[Row], prompt: int, streams: int, model: str) -> tuple[str, ...]:
    """The median of all rounds."""
    load = [
        row
        for row in rows
        if (row["prompt"], row["streams"], row["model"]) == (prompt, streams, model)
    ]

    def middle(name: str) -> Any:
        return statistics.median(row[name] for row in load)

    return (
        f"{prompt:,}",
        f"{streams}",
        model,
        f"{middle('requests_per_second'):.2f}",
        f"{middle('first_token'):.2f}",
        f"{1000 * middle('token'):.0f}",
        bytes_in_words(middle("cache")),
        bytes_in_words(middle("resident")),
    )


PAGE = Page("vllm", (serving,))
