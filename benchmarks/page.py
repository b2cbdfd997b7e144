"""Render docs/measured/*.json as docs/performance.md and its picture: ``python
benchmarks/page.py``.

The figures are whatever `fastweights bench ops`, `bench ops --scaling`, `bench decode` and `bench
train` wrote into ops.json (layers by `bench ops --only` in layers.json), scaling.json, steps.json
and train.json there (the last two may be missing); the goals beside them are the ones the project
set itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1] / "docs"
OURS = "fastweights"
Row = dict[str, Any]


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


def main() -> None:
    ops, layers, scaling, decode, train = map(
        _measured, ("ops", "layers", "scaling", "steps", "train")
    )
    slopes = [row for row in scaling["rows"] if row["type"] == "SlopeRow"]
    _plot(slopes, DOCS / "measured" / "scaling.png")
    (DOCS / "performance.md").write_text(
        "\n".join(_page(ops, layers, slopes, decode, train)) + "\n"
    )


def _measured(name: str) -> dict[str, Any]:
    path = DOCS / "measured" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def _page(
    ops: dict[str, Any],
    layers: dict[str, Any],
    slopes: list[Row],
    decode: dict[str, Any],
    train: dict[str, Any],
) -> Iterator[str]:
    header = ops["header"]
    yield "# Measured on a CPU"
    yield ""
    yield "Written by `python benchmarks/page.py` from the files in docs/measured; do not edit."
    yield ""
    yield f"{_machine(header)}. Ceilings: {_ceilings(ops['ceilings'])}."
    yield (
        "Times are medians of calls made in turn with the peers' in one run. `×` is the peer's time"
        " over ours: of the"
    )
    yield (
        "kernel that `Auto()` takes, and of the best one without the compiled extension; in"
        " brackets the goal."
    )
    yield (
        "Memory is the growth of a fresh process at its peak. Errors are relative, against float64."
    )
    rows, of_layers = (
        [row for row in run["rows"] if row["type"] == "OpRow"] for run in (ops, layers)
    )
    yield from _sections(rows)
    yield from _sections(of_layers)
    yield ""
    yield (
        f"The layers {' and '.join(_operations(of_layers))} at commit"
        f" {layers['header']['commit'][:9]}."
    )
    yield from _beside_scalar(rows)
    yield from _slopes(slopes)
    yield from _steps(decode)
    yield from _training(train)


def _machine(header: dict[str, Any]) -> str:
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


def _operations(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["op"] for row in rows))


def _sections(rows: list[Row]) -> Iterator[str]:
    for op in _operations(rows):
        yield from _section(op, [row for row in rows if row["op"] == op])


def _section(op: str, rows: list[Row]) -> Iterator[str]:
    yield ""
    yield f"## {op}"
    yield ""
    yield (
        "| sizes | | ours | without extension | best peer | × | × without | memory ours / peer |"
        " error |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for (sizes, phase), found in groupby(rows, lambda row: (str(row["sizes"]), row["phase"])):
        yield _line(op, _sizes(json.loads(sizes)), phase, list(found))


def _line(op: str, sizes: str, phase: str, rows: list[Row]) -> str:
    timed = [row for row in rows if row["seconds"]]
    ours = next(row for row in timed if row["library"] == OURS and row["auto"])
    torch = _fastest(
        [row for row in timed if row["library"] == OURS and COMPILED not in row["contender"]]
    )
    peer = _fastest(_peers(timed))
    goal = GOALS.get(op, Goal())
    wanted = goal.forward if phase == "forward" else goal.both
    cells = [
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
    return f"| {' | '.join(cells)} |"


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


def _beside_scalar(rows: list[Row]) -> Iterator[str]:
    """Time of decays per key channel over that of one decay per head."""
    chosen = {
        (row["op"], str(row["sizes"]), row["phase"]): row
        for row in rows
        if row["auto"] and row["seconds"]
    }
    yield ""
    yield "## Decay per channel against one decay per head"
    yield ""
    yield "| decay | sizes | | time / ours with one decay per head [goal] |"
    yield "|---|---|---|---|"
    for (op, sizes, phase), row in chosen.items():
        scalar = chosen.get(("decay scalar", sizes, phase))
        if op in OF_SCALAR and scalar:
            factor = row["seconds"]["median"] / scalar["seconds"]["median"]
            yield f"| {op} | {_sizes(row['sizes'])} | {phase} | {factor:.2f} [{OF_SCALAR[op]}] |"


def _crossovers(rows: list[Row]) -> Iterator[str]:
    """From which length on a linear rule on heads of the same sizes is faster than softmax
    attention.
    """
    softmax = {row["phase"]: row for row in rows if row["op"] == "softmax"}
    for row in rows:
        other = softmax.get(row["phase"])
        if row["op"] != "softmax" and other and row["sizes"] == other["sizes"]:
            slower = dict(zip(other["lengths"], other["seconds"], strict=True))
            ours = {
                t: seconds
                for t, seconds in zip(row["lengths"], row["seconds"], strict=True)
                if t in slower
            }
            behind = max((t for t, seconds in ours.items() if seconds >= slower[t]), default=0)
            first = min((t for t in ours if t > behind), default=None)
            yield (
                f"| {row['op']} | {row['phase']} | {first or f'beyond {behind}'}"
                f" [{CROSSOVER_GOAL}] |"
            )


def _slopes(rows: list[Row]) -> Iterator[str]:
    yield ""
    yield "## Time against length"
    yield ""
    yield (
        "Slope of log time over log T, from 512 to 64k tokens and over the upper half [goal"
        f" {SLOPE_GOAL}]; ms."
    )
    yield ""
    lengths = max((row["lengths"] for row in rows), key=len, default=[])
    yield f"| op | | slope | above | {' | '.join(map(str, lengths))} |"
    yield f"|---|---|---|---|{'---|' * len(lengths)}"
    for row in rows:
        cells = [f"{1e3 * seconds:.3g}" for seconds in row["seconds"]]
        times = " | ".join(cells + [""] * (len(lengths) - len(cells)))
        yield (
            f"| {row['op']} | {row['phase']} | {row['slope']:.3f} | {row['upper_slope']:.3f} |"
            f" {times} |"
        )
    if crossovers := list(_crossovers(rows)):
        yield ""
        yield (
            "Faster than softmax attention (SDPA) of the same sizes from this length on, of those"
            " measured:"
        )
        yield ""
        yield "| op | | from T [goal] |"
        yield "|---|---|---|"
        yield from crossovers
    yield ""
    yield "![Time against length](measured/scaling.png)"


def _steps(decode: dict[str, Any]) -> Iterator[str]:
    """Each of our tokens beside its floor and its fastest peer, rules before mixers before
    models.
    """
    rows = [row for row in decode["rows"] if row["type"] == "StepRow" and row["seconds"]]
    if not rows:
        return
    yield ""
    yield "## One token"
    yield ""
    bandwidth = decode["ceilings"]["bandwidth"] / 1e9
    yield (
        f"Commit {decode['header']['commit'][:9]}. The floor is the time that reading the weights"
        " once, and reading"
    )
    yield (
        f"and writing the state once, takes at {bandwidth:.0f} GB/s. Of GEMM: the model's products"
        " against the"
    )
    yield "machine's rate, which bounds many sequences at once."
    yield ""
    yield "| | | sizes | ours | × floor [goal] | of GEMM | torch.compile | fastest peer | × |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (level, op, sizes), found in groupby(
        rows, lambda row: (row["level"], row["op"], row["sizes"])
    ):
        yield _step(level, op, sizes, list(found))


def _step(level: str, op: str, sizes: str, rows: list[Row]) -> str:
    ours, *compiled = (row for row in rows if row["library"] == OURS)
    peer = _fastest([row for row in rows if row["library"] != OURS])
    goal = f" [{STEP_GOALS[level]}]" if level in STEP_GOALS else ""
    gemm = f"{ours['gemm']:.0%}" if ours.get("gemm") else ""
    beside = f"{_ms(peer)} ({peer['contender']})" if peer else ""
    own = [_ms(ours), f"{ours['over_floor']:.2f}{goal}", gemm, _ms(_fastest(compiled))]
    cells = [level, op, sizes, *own, beside, _times(peer, ours, None)]
    return f"| {' | '.join(cells)} |"


def _training(train: dict[str, Any]) -> Iterator[str]:
    """A step of small models of equal size, eager and compiled."""
    if not train["rows"]:
        return
    yield ""
    yield "## Training step, eager and compiled"
    yield ""
    yield f"{_machine(train['header'])}."
    yield (
        "Forward, backward and optimiser of small language models of equal size; compilation itself"
        " is not timed."
    )
    yield ""
    yield "| mixer | parameters | tokens | eager | torch.compile | eager / compiled |"
    yield "|---|---|---|---|---|---|"
    for mixer, found in groupby(train["rows"], lambda row: row["mixer"]):
        rows = {row["contender"]: row for row in found}
        eager, compiled = rows["eager"], rows.get("torch.compile")
        timed = [row for row in (eager, compiled) if row and row["seconds"]]
        factor = _times(timed[0], timed[1], None) if len(timed) == 2 else ""
        cells = [
            mixer,
            f"{eager['parameters']:,}",
            str(eager["tokens"]),
            _took(eager),
            _took(compiled),
            factor,
        ]
        yield f"| {' | '.join(cells)} |"


def _took(row: Row | None) -> str:
    if row is None:
        return ""
    return _ms(row) if row["seconds"] else row["note"]


def _plot(rows: list[Row], path: Path) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5.5), sharey=True)
    for axis, phase in zip(axes, ("forward", "forward+backward"), strict=True):
        for number, row in enumerate(row for row in rows if row["phase"] == phase):
            axis.loglog(
                row["lengths"],
                row["seconds"],
                marker=MARKERS[number % len(MARKERS)],
                label=row["op"],
            )
        axis.set(title=phase, xlabel="tokens")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds")
    axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
