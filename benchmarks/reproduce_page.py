"""Write docs/reproduce.md from the outcomes of claims: ``python benchmarks/reproduce_page.py
[RUNS]``.

RUNS is a folder in which ``fastweights reproduce CLAIM --out RUNS/CLAIM`` was run; its outcomes and
pictures are first taken over into docs/measured/reproduce. Without it the page is written again
from what is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from fastweights.lab.reproduce import CLAIMS, Claim

DOCS = Path(__file__).parents[1] / "docs"
MEASURED = DOCS / "measured" / "reproduce"
Outcome = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?")
    chosen = parser.parse_args()
    if chosen.runs is not None:
        take(chosen.runs)
    (DOCS / "reproduce.md").write_text(page(), encoding="utf-8")


def take(runs: Path) -> None:
    """outcome.json and picture.png of every claim in `runs`, as CLAIM-SIZE.json and .png."""
    MEASURED.mkdir(parents=True, exist_ok=True)
    for path in sorted(runs.glob("*/outcome.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        name = f"{found['claim']}-{found['size']}"
        (MEASURED / f"{name}.json").write_text(
            json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
        shutil.copyfile(path.with_name("picture.png"), MEASURED / f"{name}.png")


def page() -> str:
    """The page, from the claims and from what was measured of them."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(MEASURED.glob("*.json"))
    }
    return "\n".join([*_head(), *_table(found), *_sections(found)]) + "\n"


def _head() -> Iterator[str]:
    yield "# The papers' claims, tested"
    yield ""
    yield (
        "Written by `python benchmarks/reproduce_page.py` from the files in"
        " docs/measured/reproduce; do not edit."
    )
    yield ""
    yield (
        "`fastweights reproduce` lists the claims; `fastweights reproduce CLAIM --size"
        " cpu|gpu|paper` tests one, and"
    )
    yield (
        "goes on where it was stopped. A claim is a list of inequalities and equations between"
        " numbers measured over"
    )
    yield (
        "seeds. Each is judged by the interval of the exact rank test (5 % doubt on either side):"
        " it *holds*, it"
    )
    yield (
        "*does not hold*, or it *does not show*: the seeds' spread covers both. A claim holds if"
        " all of its parts do."
    )


def _table(found: dict[str, Outcome]) -> Iterator[str]:
    yield ""
    yield "| claim | paper | | at size | verdict | parts that hold | minutes |"
    yield "|---|---|---|---|---|---|---|"
    for name, one in CLAIMS.items():
        sizes = [found[f"{name}-{size}"] for size in one.sizes if f"{name}-{size}" in found]
        if not sizes:
            yield f"| `{name}` | {one.paper}, {one.place} | {one.statement} | | not run yet | | |"
        for outcome in sizes:
            parts = f"{outcome['tally'].get('holds', 0)} of {len(outcome['checks'])}"
            yield (
                f"| [`{name}`](#{name.replace('.', '')}) | {one.paper}, {one.place} |"
                f" {one.statement} |"
                f" {outcome['size']} | **{outcome['verdict']}** | {parts} |"
                f" {outcome['minutes']:.1f} |"
            )


def _sections(found: dict[str, Outcome]) -> Iterator[str]:
    for name, one in CLAIMS.items():
        for size in one.sizes:
            if outcome := found.get(f"{name}-{size}"):
                yield from _section(name, one, outcome)


def _section(name: str, one: Claim, outcome: Outcome) -> Iterator[str]:
    size = one.sizes[outcome["size"]]
    yield ""
    yield f"## {name}"
    yield ""
    yield f"{one.paper}, {one.place}: {one.statement}"
    for remark in filter(
        None, (one.remark, f"Size {outcome['size']}: {size.note}" if size.note else "")
    ):
        yield ""
        yield remark
    yield ""
    yield "| statement | difference | from | to | verdict |"
    yield "|---|---|---|---|---|"
    for check in outcome["checks"]:
        numbers = " | ".join(_number(check[part]) for part in ("difference", "low", "high"))
        yield f"| {check['sentence']} | {numbers} | {check['verdict']} |"
    yield from _figures(one, outcome)
    yield ""
    yield f"![{name}](measured/reproduce/{name}-{outcome['size']}.png)"


def _figures(one: Claim, outcome: Outcome) -> Iterator[str]:
    """The paper's numbers beside ours, where it prints any."""
    if not one.figures:
        return
    yield ""
    yield f"| {one.unit} | | paper | ours (median, range) |"
    yield "|---|---|---|---|"
    for series, columns in one.figures.items():
        for column, printed in columns.items():
            yield f"| {series} | {column} | {printed:g} | {_ours(outcome, series, column)} |"


def _ours(outcome: Outcome, series: str, column: str) -> str:
    """Whatever was measured of this series in this column, a place or a quantity."""
    values = [
        row["value"]
        for row in outcome["measures"]
        if row["series"] == series
        and column in (str(row["x"]), row["quantity"])
        and "updates" not in row["quantity"]
    ]
    return f"{median(values):.4g} ({min(values):.4g} – {max(values):.4g})" if values else ""


def _number(x: float | None) -> str:
    return "∞" if x is None else f"{x:.3g}"


if __name__ == "__main__":
    main()
