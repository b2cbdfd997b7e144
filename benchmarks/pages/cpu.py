"""bfloat16 and long convolutions on a CPU, for docs/performance.md."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Row, results

ACTS = {
    "read": "512 tokens read",
    "learn": "forward and backward",
    "decode": "32 tokens decoded",
}


def models() -> str:
    """Models in bfloat16 beside float32."""
    rows = [
        [mixer, said, *_model(acts[act])]
        for mixer, acts in results("bfloat16")["models"].items()
        for act, said in ACTS.items()
    ]
    return table(["mixer", "", "float32", "bfloat16", "×", "autocast"], rows)


def _model(found: Row) -> list[str]:
    wide, narrow = found["float32"], found["bfloat16"]
    autocast = _ms(found["autocast"]) if "autocast" in found else ""
    return [_ms(wide), _ms(narrow), f"{wide / narrow:.1f}", autocast]


def streams() -> str:
    """Streams of bfloat16 in the compiled kernels."""
    rows = [
        [name, act, *(_ms(found[way]) for way in ("narrow", "converted", "float32"))]
        for name, acts in results("bfloat16")["operations"].items()
        for act, found in acts.items()
    ]
    return table(["kernel", "", "bfloat16 as it is", "converted", "float32"], rows)


def long_convolutions() -> str:
    """Long convolutions of whole sequences beside plain FFTs and softmax attention."""
    peers = ("plain FFT", "SDPA")
    columns = ["tokens", "channels of a head", "", "ours", *(f"{peer}, ×" for peer in peers)]
    rows = (
        [
            f"{row['tokens']:,}",
            str(row["width"]),
            "forward and backward" if row["backward"] else "forward",
            _ms(row["ours_ms"]),
            *(_ratio(row, peer) for peer in peers),
        ]
        for row in results("long_convolution")["sequences"]
    )
    return table(columns, rows)


def long_convolution_tokens() -> str:
    """One token behind others: the convolution, and a layer of it."""
    found = results("long_convolution")
    columns = ["", "tokens", "ours", "FFT of all tokens, ×", "SDPA, ×", "filter made anew, ×"]
    rows = [
        [
            name,
            f"{row['tokens']:,}",
            _ms(row["ours_ms"]),
            *(_ratio(row, peer) for peer in TOKEN_PEERS),
        ]
        for name, part in (("`LongConvolution`", "tokens"), ("layer `hyena`", "layers"))
        for row in found[part]
    ]
    return table(columns, rows)


TOKEN_PEERS = ("plain FFT", "SDPA", "filter made anew")


def _ratio(row: Row, peer: str) -> str:
    return f"{row[peer]:.2f}" if peer in row else ""


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"
