"""docs/performance.md: rules, layers and models beside other libraries'.

The results are what `fastweights bench ops`, `bench ops --scaling`, `bench decode` and `bench
train` wrote: ops.json (layers by `bench ops --only` in layers.json), scaling.json, steps.json and
train.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend_beside, png
from pages import cpu
from pages.page import Page, Row, origin, results, rows_of

OURS = "fastweights"


PHASES = ("forward", "forward+backward")
USUAL_SIZES = [1, 2048, 8, 64, 64]
OTHER_FUNCTION = "SDPA"
COMPILED = "(compiled)"
MARKERS = "oDv^sP*X"


def machine() -> str:
    return f"{origin('ops')}. Ceilings: {_ceilings(results('ops')['ceilings'])}."


def _ceilings(ceilings: dict[str, float | None]) -> str:
    rates = {"bandwidth": ("GB/s", 1e9)}
    parts = []
    for name, value in ceilings.items():
        unit, scale = rates.get(name, ("GFLOP/s", 1e9))
        if value is not None:
            parts.append(f"{name} {value / scale:.0f} {unit}")
    return ", ".join(parts)


def operations() -> str:
    return _operations(rows_of("ops", type="OpRow"))


def layers() -> str:
    commit = results("layers")["header"]["commit"]
    return f"{_operations(rows_of('layers', type='OpRow'))}\n\nCommit {commit[:9]}."


def _operations(rows: list[Row]) -> str:
    """A line for each operation and size: forward / forward and backward."""
    phases: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        sizes = "" if row["sizes"] == USUAL_SIZES else _sizes(row["sizes"])
        found = phases.setdefault((row["op"], sizes), {})
        found.setdefault(row["phase"], []).append(row)
    columns = ("", "sizes", "ours, ms", "without extension", "best peer, ms", "×", "memory, MB")
    lines = ([*key, *_line(found)] for key, found in phases.items())
    return table((*columns, "peer's", "error"), lines)


def _line(phases: dict[str, list[Row]]) -> list[str]:
    timed = [[row for row in phases[phase] if row["seconds"]] for phase in PHASES]
    ours = [next(row for row in rows if row["library"] == OURS and row["auto"]) for rows in timed]
    torch = [
        _fastest([r for r in rows if r["library"] == OURS and COMPILED not in r["contender"]])
        for rows in timed
    ]
    peers = [_fastest(_peers(rows)) for rows in timed]
    names = ", ".join(dict.fromkeys(peer["contender"] for peer in peers if peer))
    return [
        *(_both(map(_ms, rows)) for rows in (ours, torch)),
        " ".join(filter(None, (_both(map(_ms, peers)), names and f"({names})"))),
        _both(map(_times, peers, ours)),
        *(_both(map(_memory, rows)) for rows in (ours, peers)),
        _errors(ours[0]),
    ]


def _both(values: Iterable[str]) -> str:
    return " / ".join(filter(None, values))


def _peers(rows: list[Row]) -> list[Row]:
    """Those who compute the same; SDPA stands beside a linear rule only where there is
    nobody else.
    """
    peers = [row for row in rows if row["library"] != OURS]
    same = [row for row in peers if row["contender"] != OTHER_FUNCTION]
    return same or peers


def _fastest(rows: list[Row]) -> Row | None:
    return min(rows, key=lambda row: row["seconds"]["median"], default=None)


def _sizes(sizes: list[int]) -> str:
    return " ".join(f"{letter}{size}" for letter, size in zip("bthkv", sizes, strict=True))


def _ms(row: Row | None) -> str:
    return f"{1e3 * row['seconds']['median']:.3g}" if row else ""


def _times(peer: Row | None, ours: Row | None) -> str:
    if not (peer and ours):
        return ""
    return f"{peer['seconds']['median'] / ours['seconds']['median']:.1f}"


def _memory(row: Row | None) -> str:
    return f"{row['peak_bytes'] / 1e6:.0f}" if row and row["peak_bytes"] else ""


def _errors(row: Row) -> str:
    found = [row[name] for name in ("error", "gradient_error") if row[name] is not None]
    return ", ".join(f"{value:.0e}" for value in found)


def _slopes() -> list[Row]:
    return rows_of("scaling", type="SlopeRow")


def lengths() -> str:
    """Every second length; all are in the picture."""
    rows = _slopes()
    measured = max((row["lengths"] for row in rows), key=len)
    shown = [*measured[::2], measured[-1]]

    def lines() -> Iterator[tuple[str, ...]]:
        for row in rows:
            times = dict(zip(row["lengths"], row["seconds"], strict=True))
            cells = (f"{1e3 * times[t]:.3g}" if t in times else "" for t in shown)
            slopes = f"{row['slope']:.3f}", f"{row['upper_slope']:.3f}"
            yield row["op"], row["phase"], *slopes, *cells

    return table(("op", "", "slope", "upper half", *map(str, shown)), lines())


def crossovers() -> str:
    found: dict[str, dict[str, str]] = {}
    for op, phase, first in _crossovers(_slopes()):
        found.setdefault(op, {})[phase] = first
    return table(
        ("op", *PHASES),
        ([op, *(row.get(phase, "") for phase in PHASES)] for op, row in found.items()),
    )


def _crossovers(rows: list[Row]) -> Iterator[tuple[str, str, str]]:
    """From which length on a linear rule on heads of the same sizes is faster than softmax
    attention.
    """
    softmax = {row["phase"]: row for row in rows if row["op"] == "softmax"}
    for row in rows:
        other = softmax.get(row["phase"])
        if row["op"] != "softmax" and other and row["sizes"] == other["sizes"]:
            slower = dict(zip(other["lengths"], other["seconds"], strict=True))
            ours = dict(zip(row["lengths"], row["seconds"], strict=True))
            shared = sorted(ours.keys() & slower.keys())
            behind = max((t for t in shared if ours[t] >= slower[t]), default=0)
            first = min((t for t in shared if t > behind), default=None)
            yield row["op"], row["phase"], f"{first or f'beyond {behind}'}"


def tokens() -> str:
    """Each of our tokens beside its floor and its fastest peer, rules before mixers before
    models.
    """
    decode = results("steps")
    rows = [row for row in rows_of("steps", type="StepRow") if row["seconds"]]
    columns = ("", "", "sizes", "ours, ms", "× floor", "torch.compile")
    lines = (
        _token(*key, list(found))
        for key, found in groupby(rows, lambda row: (row["level"], row["op"], row["sizes"]))
    )
    commit, bandwidth = decode["header"]["commit"], decode["ceilings"]["bandwidth"]
    head = f"Commit {commit[:9]}, {bandwidth / 1e9:.0f} GB/s."
    return f"{head}\n\n{table((*columns, 'fastest peer, ms', '×'), lines)}"


def _token(level: str, op: str, sizes: str, rows: list[Row]) -> list[str]:
    ours, *compiled = (row for row in rows if row["library"] == OURS)
    peer = _fastest([row for row in rows if row["library"] != OURS])
    beside = f"{_ms(peer)} ({peer['contender']})" if peer else ""
    own = [_ms(ours), f"{ours['over_floor']:.2f}", _ms(_fastest(compiled))]
    return [level, op, sizes, *own, beside, _times(peer, ours)]


def training() -> str:
    """A step of small models of equal size, eager and compiled."""
    columns = ("mixer", "parameters", "tokens", "eager, ms", "torch.compile", "eager / compiled")
    lines = (
        _training(mixer, {row["contender"]: row for row in found})
        for mixer, found in groupby(rows_of("train"), lambda row: row["mixer"])
    )
    return f"{origin('train')}.\n\n{table(columns, lines)}"


def _training(mixer: str, rows: dict[str, Row]) -> list[str]:
    eager, compiled = rows["eager"], rows.get("torch.compile")
    timed = [row for row in (eager, compiled) if row and row["seconds"]]
    factor = _times(timed[0], timed[1]) if len(timed) == 2 else ""
    sizes = f"{eager['parameters']:,}", str(eager["tokens"])
    return [mixer, *sizes, _took(eager), _took(compiled), factor]


def _took(row: Row | None) -> str:
    if row is None:
        return ""
    return _ms(row) if row["seconds"] else row["note"]


def scaling() -> bytes:
    """Time against length, both logarithmic."""
    figure, axes = canvas(1, 2, 4.6, 3.8)
    for panel, phase in zip(axes[0], PHASES, strict=True):
        for number, row in enumerate(row for row in _slopes() if row["phase"] == phase):
            color, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
            panel.loglog(
                row["lengths"],
                row["seconds"],
                color=color,
                marker=marker,
                markersize=3,
                label=row["op"],
            )
        label(panel, phase, "tokens", "seconds")
    legend_beside(axes[0, 1])
    return png(figure)


PAGE = Page(
    "performance",
    (
        machine,
        operations,
        layers,
        lengths,
        crossovers,
        tokens,
        training,
        cpu.bfloat16_models,
        cpu.bfloat16_streams,
        cpu.long_convolutions,
        cpu.long_convolution_tokens,
    ),
    {"scaling.png": scaling},
)
