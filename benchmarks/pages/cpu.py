"""bfloat16 and long convolutions on a CPU, for docs/performance.md."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Row, rows_of

ACTS = ("read", "learn", "decode")


def bfloat16_models() -> str:
    """Milliseconds of models in float32, bfloat16 and, where measured, under autocast."""
    rows = [
        [row["name"], *(_model(row[act]) for act in ACTS)]
        for row in rows_of("bfloat16", part="model")
    ]
    columns = ("mixer", "512 tokens read", "forward and backward", "32 tokens decoded")
    return table(columns, rows)


def _model(found: Row) -> str:
    times = (found[kind] for kind in ("float32", "bfloat16", "autocast") if kind in found)
    return " / ".join(f"{time:.3g}" for time in times)


def bfloat16_streams() -> str:
    """Milliseconds of the compiled kernels by streams, forward / forward and backward."""
    rows = [
        [
            row["name"],
            *(
                " / ".join(f"{row[act][way]:.3g}" for act in ("forward", "forward and backward"))
                for way in ("narrow", "converted", "float32")
            ),
        ]
        for row in rows_of("bfloat16", part="operation")
    ]
    return table(["kernel", "bfloat16", "converted", "float32"], rows)


def long_convolutions() -> str:
    """Long convolutions of whole sequences beside plain FFTs and softmax attention, forward /
    forward and backward.
    """
    both: dict[tuple[int, int], list[Row]] = {}
    for row in rows_of("long_convolution", group="sequences"):
        both.setdefault((row["tokens"], row["width"]), []).append(row)
    columns = ["tokens", "channels of a head", "ours, ms", "plain FFT, ×", "SDPA, ×"]
    rows = (
        [
            f"{tokens:,}",
            str(width),
            " / ".join(f"{row['ours_ms']:.3g}" for row in found),
            *(" / ".join(_ratio(row, peer) for row in found) for peer in TOKEN_PEERS[:2]),
        ]
        for (tokens, width), found in both.items()
    )
    return table(columns, rows)


def long_convolution_tokens() -> str:
    """One token behind others: the convolution, and a layer of it."""
    columns = ["", "tokens", "ours", "FFT of all tokens, ×", "SDPA, ×", "filter made anew, ×"]
    rows = [
        [
            name,
            f"{row['tokens']:,}",
            _ms(row["ours_ms"]),
            *(_ratio(row, peer) for peer in TOKEN_PEERS),
        ]
        for name, part in (("`LongConvolution`", "tokens"), ("layer `hyena`", "layers"))
        for row in rows_of("long_convolution", group=part)
    ]
    return table(columns, rows)


TOKEN_PEERS = ("plain FFT", "SDPA", "filter made anew")


def _ratio(row: Row, peer: str) -> str:
    return f"{row[peer]:.2f}" if peer in row else ""


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"
