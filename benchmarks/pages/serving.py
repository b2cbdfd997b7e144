"""docs/serving.md: weights of 8 and 4 bits, and the tokens of a pretrained model."""

from __future__ import annotations

from collections.abc import Callable

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, logarithmic, png
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


THEIRS = "transformers"
SPEED = "tokens per second"


def token() -> str:
    """Tokens per second of each way, and times transformers'."""
    return _speeds("decoding", lambda row: f"after {row['context']:,}")


def flat() -> str:
    """The conversion in 4 bits after prompts of all lengths, in turn."""
    (row,) = (row[SPEED] for row in rows_of("decoding") if "context" not in row)
    most, least = max(row.values()), min(row.values())
    spread = f"{most / least - 1:.0%} between the fastest and the slowest"
    each = ", ".join(f"{speed:.1f} {when}" for when, speed in row.items())
    return f"Tokens per second: {each}: {spread}."


def gemma() -> str:
    """Those of Gemma 3."""
    return _speeds("decoding-gemma", lambda row: f"after {row['context']:,}")


def one() -> str:
    """The same by one thread."""
    return _speeds("decoding-one", lambda row: f"after {row['context']:,}")


def several() -> str:
    """The same of several sequences together."""
    return _speeds("decoding-several", lambda row: f"{row['sequences']} sequences")


def _after_prompts(name: str) -> list[Row]:
    """All ways after prompts, without the one that is "flat" over them."""
    return [row for row in rows_of(name) if "context" in row]


def _speeds(name: str, column: Callable[[Row], str]) -> str:
    rows = _after_prompts(name)
    lines = ((way, *(_speed(row[SPEED], way) for row in rows)) for way in rows[0][SPEED])
    return f"{origin(name)}.\n\n{table((SPEED, *map(column, rows)), lines)}"


def _speed(speed: Row, way: str) -> str:
    return f"{speed[way]:.1f} ({speed[way] / speed[THEIRS]:.2f}×)"


DRAWN = (
    THEIRS,
    "llama.cpp",
    "ONNX Runtime GenAI",
    "imported",
    "imported, 4 bits",
    "default conversion",
    "default conversion, int8",
    "default conversion, 4 bits",
)


def token_picture() -> bytes:
    """The same over the tokens before."""
    figure, axes = canvas(1, 1, width=6.5, height=3.6)
    rows = _after_prompts("decoding")
    for color, way in zip(PALETTE, DRAWN, strict=False):
        contexts, found = [row["context"] for row in rows], [row[SPEED][way] for row in rows]
        style = "--" if way in DRAWN[:3] else "-"
        axes[0, 0].plot(contexts, found, style, color=color, marker="o", markersize=3, label=way)
    label(axes[0, 0], "SmolLM2-135M, one sequence", "tokens before", SPEED)
    axes[0, 0].set_xscale("log", base=2)
    logarithmic(axes[0, 0])
    axes[0, 0].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return png(figure)


PAGE = Page(
    "serving",
    (quantized, perplexity, speed, token, flat, gemma, one, several),
    {"smollm2-token.png": token_picture},
)
