"""docs/several-processes.md and docs/long-sequences.md: what several processes take and give."""

from __future__ import annotations

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend_beside, png
from fastweights.render.units import bytes_in_words
from pages.page import Page, Row, rows_of, table_of

RIVALS = {"ulysses": "Ulysses", "ring": "ring attention"}
DRAWN = ("metala", "gated_deltanet", "mamba2", "mesa")
WHERE = {"processes": lambda row: f"{row['count']}", "model": lambda row: row["layout"]}


def overhead() -> str:
    (found,) = rows_of("processes", group="overhead")
    return (
        f"Time of the loop's update over that of the bare step, alternately in one process:"
        f" {found['ratio']:.3f} (median; {found['smallest']:.3f} to {found['largest']:.3f}), at"
        f" {found['milliseconds']:.0f} ms an update."
    )


def speed() -> str:
    rows = rows_of("processes", part="speed")
    alone = rows[0]["tokens_per_second"]
    columns = {
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "times one": lambda row: f"{row['tokens_per_second'] / alone:.2f}",
    }
    return table_of(rows, WHERE | columns)


def memory() -> str:
    columns = {
        "weights and optimiser": lambda row: bytes_in_words(row["held"]),
        "most that the process held": lambda row: bytes_in_words(row["peak"]),
    }
    return table_of(rows_of("processes", part="memory"), WHERE | columns)


def _traffic() -> list[Row]:
    return rows_of("sequence_parallel", part="traffic")


def _bytes_sent(method: str, mixer: str, tokens: int, processes: int) -> int:
    return next(
        row["sent"]
        for row in _traffic()
        if (row["method"], row["mixer"], row["tokens"], row["processes"])
        == (method, mixer, tokens, processes)
    )


def traffic() -> str:
    """By time, which does not depend on the tokens; then what does."""
    names = list(dict.fromkeys(row["mixer"] for row in _traffic()))
    counts = sorted({row["processes"] for row in _traffic()})
    lengths = sorted({row["tokens"] for row in _traffic()})
    by_time = (
        [f"{n} processes, any length", *(_in_words("TimeSharded", m, lengths[0], n) for m in names)]
        for n in counts
    )
    growing = ([f"{n} processes, {t:,} tokens", *_growing(n, t)] for n in counts for t in lengths)
    heads = ("", "metala by `HeadSharded`", *RIVALS.values())
    return f"{table(('', *names), by_time)}\n\n{table(heads, growing)}"


def _in_words(method: str, mixer: str, tokens: int, processes: int) -> str:
    return bytes_in_words(_bytes_sent(method, mixer, tokens, processes))


def _growing(processes: int, tokens: int) -> list[str]:
    row = next(r for r in _traffic() if (r["processes"], r["tokens"]) == (processes, tokens))
    rivals = [bytes_in_words(row[name]) for name in RIVALS]
    return [_in_words("HeadSharded", "metala", tokens, processes), *rivals]


def steps() -> str:
    columns = {
        "mixer": lambda row: row["mixer"],
        "processes": lambda row: f"{row['processes']}",
        "memory per process": lambda row: bytes_in_words(row["bytes"]),
        "seconds": lambda row: f"{row['seconds']:.2f}",
        "loss": lambda row: f"{row['loss']:.6f}",
        "‖gradient‖²": lambda row: f"{row['gradient']:.8f}",
    }
    return table_of(rows_of("sequence_parallel", part="step"), columns)


def draw_traffic() -> bytes:
    """Bytes of four processes by the length of the sequence, both by powers of ten."""
    figure, grid = canvas(width=6.0, height=3.2)
    axes = grid[0, 0]
    lengths = sorted({row["tokens"] for row in _traffic() if row["processes"] == 4})
    for name, color in zip(DRAWN, PALETTE, strict=False):
        sent = [_bytes_sent("TimeSharded", name, tokens, 4) for tokens in lengths]
        axes.plot(lengths, sent, color=color, marker="o", label=name)
    for name, style in zip(RIVALS, ("--", ":"), strict=True):
        rival = {row["tokens"]: row[name] for row in _traffic() if row["processes"] == 4}
        axes.plot(lengths, [rival[t] for t in lengths], style, color="black", label=RIVALS[name])
    axes.set(xscale="log", yscale="log")
    label(axes, "one layer of d = 64 on four processes", "tokens", "bytes sent by each")
    legend_beside(axes)
    return png(figure)


SEVERAL = Page("several-processes", (overhead, speed, memory))
LONG = Page("long-sequences", (traffic, steps), {"sequence_parallel.png": draw_traffic})
