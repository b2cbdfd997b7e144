"""docs/performance.md: rules, layers and models beside other libraries'.

The results are what `fastweights bench ops`, `bench ops --scaling`, `bench decode` and `bench
train` wrote: ops.json (layers by `bench ops --only` in layers.json), scaling.json, steps.json and
train.json. The goals beside them are the ones the project set itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend_beside, png
from pages import cpu
from pages.page import Page, Row, Stretches, results

OURS = "fastweights"


@dataclass(frozen=True)
class Goal:
    """How many times faster than the best peer, by the compiled extension and by torch alone,
    forward and with backward; and the part of its memory. None: no goal was set.
    """

    forward: tuple[float, float] | None = None
    both: tuple[float, float] | None = None
    memory: float | None = None


GOALS = {
    "decay none": Goal((4.5, 2), (4.5, 2), 1 / 3),
    "decay scalar": Goal((4.5, 2), (4.5, 2), 1 / 3),
    "delta none": Goal((4, 2), (4, 2), 1 / 4),
    "delta scalar": Goal((4, 2), (4, 2), 1 / 4),
    "delta vector": Goal((20, 20), (20, 20), 1 / 20),
    "mesa 30 steps": Goal((4, 4), (4, 4), 1 / 10),
    "scan real": Goal((3, 3), (200, 200), 1 / 2),
    "selective scan": Goal((5, 5), (200, 200), 1 / 5),
}
OF_SCALAR = {"decay vector gentle": 1.3, "decay vector steep": 2.5, "decay tied": 1.3}
SLOPE_GOAL = 1.05
CROSSOVER_GOAL = 512
STEP_GOALS = {"recurrence": 1.5, "model": 1.3}
OTHER_FUNCTION = "SDPA"
COMPILED = "(compiled)"
MARKERS = "oDv^sP*X"


def machine() -> str:
    ops = results("ops")
    return f"{_machine(ops['header'])}. Ceilings: {_ceilings(ops['ceilings'])}."


def _machine(header: Row) -> str:
    machine, versions = header["machine"], header["versions"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return f"Commit {header['commit'][:9]}; {machine['cpu']}, {threads}; {shown}"


def _ceilings(ceilings: dict[str, float | None]) -> str:
    rates = {"bandwidth": ("GB/s", 1e9)}
    parts = []
    for name, value in ceilings.items():
        unit, scale = rates.get(name, ("GFLOP/s", 1e9))
        if value is not None:
            parts.append(f"{name} {value / scale:.0f} {unit}")
    return ", ".join(parts)


def operations() -> str:
    return _sections(_of_ops("ops"))


def layers() -> str:
    rows, header = _of_ops("layers"), results("layers")["header"]
    names = " and ".join(_operations(rows))
    return f"{_sections(rows)}\n\nThe layers {names} at commit {header['commit'][:9]}."


def _of_ops(name: str) -> list[Row]:
    return [row for row in results(name)["rows"] if row["type"] == "OpRow"]


def _operations(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["op"] for row in rows))


def _sections(rows: list[Row]) -> str:
    return "\n\n".join(
        f"## {op}\n\n{_operation(op, [row for row in rows if row['op'] == op])}"
        for op in _operations(rows)
    )


def _operation(op: str, rows: list[Row]) -> str:
    columns = ("sizes", "", "ours", "without extension", "best peer", "×", "× without")
    lines = (
        _line(op, _sizes(json.loads(sizes)), phase, list(found))
        for (sizes, phase), found in groupby(rows, lambda row: (str(row["sizes"]), row["phase"]))
    )
    return table((*columns, "memory ours / peer", "error"), lines)


def _line(op: str, sizes: str, phase: str, rows: list[Row]) -> list[str]:
    timed = [row for row in rows if row["seconds"]]
    ours = next(row for row in timed if row["library"] == OURS and row["auto"])
    torch = _fastest(
        [row for row in timed if row["library"] == OURS and COMPILED not in row["contender"]]
    )
    peer = _fastest(_peers(timed))
    goal = GOALS.get(op, Goal())
    wanted = goal.forward if phase == "forward" else goal.both
    return [
        sizes,
        phase,
        _ms(ours),
        _ms(torch),
        f"{_ms(peer)} ({peer['contender']})" if peer else "",
        _times(peer, ours, wanted and wanted[0]),
        _times(peer, torch, wanted and wanted[1]),
        _memory(ours, peer, goal.memory),
        _errors(ours),
    ]


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
    return f"{1e3 * row['seconds']['median']:.3g} ms" if row else ""


def _times(peer: Row | None, ours: Row | None, goal: float | None) -> str:
    if not (peer and ours):
        return ""
    factor = f"{peer['seconds']['median'] / ours['seconds']['median']:.1f}"
    return f"{factor} [{goal:g}]" if goal else factor


def _memory(ours: Row, peer: Row | None, goal: float | None) -> str:
    if not ours["peak_bytes"]:
        return ""
    text = f"{ours['peak_bytes'] / 1e6:.0f} MB"
    if not (peer and peer["peak_bytes"]):
        return text
    wanted = f" [{goal:.2f}]" if goal else ""
    return (
        f"{text} / {peer['peak_bytes'] / 1e6:.0f} MB ="
        f" {ours['peak_bytes'] / peer['peak_bytes']:.2f}{wanted}"
    )


def _errors(row: Row) -> str:
    found = [row[name] for name in ("error", "gradient_error") if row[name] is not None]
    return ", ".join(f"{value:.0e}" for value in found)


def per_channel() -> str:
    """Time of decays per key channel over that of one decay per head."""
    chosen = {
        (row["op"], str(row["sizes"]), row["phase"]): row
        for row in _of_ops("ops")
        if row["auto"] and row["seconds"]
    }

    def lines() -> Iterator[tuple[str, ...]]:
        for (op, sizes, phase), row in chosen.items():
            scalar = chosen.get(("decay scalar", sizes, phase))
            if op in OF_SCALAR and scalar:
                factor = row["seconds"]["median"] / scalar["seconds"]["median"]
                yield op, _sizes(row["sizes"]), phase, f"{factor:.2f} [{OF_SCALAR[op]}]"

    return table(("decay", "sizes", "", "time / ours with one decay per head [goal]"), lines())


def _slopes() -> list[Row]:
    return [row for row in results("scaling")["rows"] if row["type"] == "SlopeRow"]


def lengths() -> str:
    rows = _slopes()
    measured = max((row["lengths"] for row in rows), key=len)

    def lines() -> Iterator[tuple[str, ...]]:
        for row in rows:
            times = [f"{1e3 * seconds:.3g}" for seconds in row["seconds"]]
            times += [""] * (len(measured) - len(times))
            yield (
                row["op"],
                row["phase"],
                f"{row['slope']:.3f}",
                f"{row['upper_slope']:.3f}",
                *times,
            )

    return table(("op", "", "slope", "above", *map(str, measured)), lines())


def crossovers() -> str:
    return table(("op", "", "from T [goal]"), _crossovers(_slopes()))


def _crossovers(rows: list[Row]) -> Iterator[tuple[str, ...]]:
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
            yield row["op"], row["phase"], f"{first or f'beyond {behind}'} [{CROSSOVER_GOAL}]"


def tokens() -> str:
    """Each of our tokens beside its floor and its fastest peer, rules before mixers before
    models.
    """
    decode = results("steps")
    rows = [row for row in decode["rows"] if row["type"] == "StepRow" and row["seconds"]]
    columns = ("", "", "sizes", "ours", "× floor [goal]", "of GEMM", "torch.compile")
    lines = (
        _token(*key, list(found))
        for key, found in groupby(rows, lambda row: (row["level"], row["op"], row["sizes"]))
    )
    commit, bandwidth = decode["header"]["commit"], decode["ceilings"]["bandwidth"]
    head = f"Commit {commit[:9]}, {bandwidth / 1e9:.0f} GB/s."
    return f"{head}\n\n{table((*columns, 'fastest peer', '×'), lines)}"


def _token(level: str, op: str, sizes: str, rows: list[Row]) -> list[str]:
    ours, *compiled = (row for row in rows if row["library"] == OURS)
    peer = _fastest([row for row in rows if row["library"] != OURS])
    goal = f" [{STEP_GOALS[level]}]" if level in STEP_GOALS else ""
    gemm = f"{ours['gemm']:.0%}" if ours.get("gemm") else ""
    beside = f"{_ms(peer)} ({peer['contender']})" if peer else ""
    own = [_ms(ours), f"{ours['over_floor']:.2f}{goal}", gemm, _ms(_fastest(compiled))]
    return [level, op, sizes, *own, beside, _times(peer, ours, None)]


def training() -> str:
    """A step of small models of equal size, eager and compiled."""
    train = results("train")
    columns = ("mixer", "parameters", "tokens", "eager", "torch.compile", "eager / compiled")
    lines = (
        _training(mixer, {row["contender"]: row for row in found})
        for mixer, found in groupby(train["rows"], lambda row: row["mixer"])
    )
    return f"{_machine(train['header'])}.\n\n{table(columns, lines)}"


def _training(mixer: str, rows: dict[str, Row]) -> list[str]:
    eager, compiled = rows["eager"], rows.get("torch.compile")
    timed = [row for row in (eager, compiled) if row and row["seconds"]]
    factor = _times(timed[0], timed[1], None) if len(timed) == 2 else ""
    sizes = f"{eager['parameters']:,}", str(eager["tokens"])
    return [mixer, *sizes, _took(eager), _took(compiled), factor]


def _took(row: Row | None) -> str:
    if row is None:
        return ""
    return _ms(row) if row["seconds"] else row["note"]


def scaling() -> bytes:
    """Time against length, both logarithmic."""
    figure, axes = canvas(1, 2, 4.6, 3.8)
    for panel, phase in zip(axes[0], ("forward", "forward+backward"), strict=True):
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
    Stretches(
        {
            "machine": machine,
            "operations": operations,
            "layers": layers,
            "per_channel": per_channel,
            "lengths": lengths,
            "crossovers": crossovers,
            "tokens": tokens,
            "training": training,
            "bfloat16_models": cpu.models,
            "bfloat16_streams": cpu.streams,
            "long_convolutions": cpu.long_convolutions,
            "long_convolution_tokens": cpu.long_convolution_tokens,
        }
    ),
    {"scaling.png": scaling},
)
