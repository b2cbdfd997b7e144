"""Render docs/measured/linearize.json into docs/linearize.md: ``python
benchmarks/linearize_page.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
MARK = "<!-- measured -->"
Row = dict[str, Any]


def main() -> None:
    page = DOCS / "linearize.md"
    before, _, _ = page.read_text().partition(MARK)
    results = json.loads((DOCS / "measured" / "linearize.json").read_text())
    page.write_text(before + "\n".join([MARK, "", *_sections(results)]) + "\n")


def _sections(results: dict[str, Any]) -> Iterator[str]:
    yield (
        f"By `benchmarks/linearize.py`, on {_machine(results)}; `docs/measured/linearize.json` has"
        " all numbers."
    )
    if "text" in results:
        yield from _text(results["text"]["rows"])
    if "recall" in results:
        yield from _recall(results["recall"]["rows"])
    if "scaling" in results:
        yield from _scaling(results["scaling"]["rows"])
    yield from _generation(
        json.loads((DOCS / "measured" / "linearize_generation.json").read_text())["rows"]
    )


def _machine(results: dict[str, Any]) -> str:
    machine = next(iter(results.values()))["machine"]
    return f"{machine['cores']} cores of {machine['cpu']}"


def _text(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0]
    softmax = first["evaluation"]["softmax"]["perplexity"]
    yield ""
    yield "### A Llama of text: LoLCATs' Table 1"
    yield ""
    yield (
        f"A Llama of 3.4 million parameters, perplexity {softmax:.1f} on held-out text;"
        f" {first['transfer_tokens']:,} tokens of transfer, {first['finetune_tokens']:,} of LoRA."
        " The error of outputs is relative, KL is of attention weights in nats per query, both"
        " means over layers before adaptation; *recovered* is the part of the gap between the"
        " plain swap of the same features and softmax that both stages close."
    )
    yield ""
    yield from _table(
        (
            "method",
            "PPL at swap",
            "PPL adapted",
            "/ softmax",
            "recovered",
            "error",
            "KL",
            "window only",
            "linear only",
        ),
        (_row(row, softmax) for row in rows),
    )
    yield ""
    yield (
        "*window only* and *linear only* are the finished model with one side of its attention"
        " taken away: where window only is as good, the linear side is hardly used, since the"
        " teacher itself looks back little further."
    )
    yield ""
    yield "![attention maps](measured/linearize-maps.png)"
    yield ""
    yield "![loss by position](measured/linearize-positions.png)"


def _row(row: Row, softmax: float) -> list[str]:
    before = row["transfer"] or row["convert"]
    swapped, final = before["linear"]["perplexity"], row["evaluation"]["linear"]["perplexity"]
    plain = row["convert"]["linear"]["perplexity"]
    sides = [
        row["evaluation"].get(side, {}).get("perplexity") for side in ("window only", "linear only")
    ]
    return [
        row["method"],
        f"{swapped:.1f}",
        f"{final:.1f}",
        f"{final / softmax:.3f}",
        f"{(plain - final) / (plain - softmax):.1%}",
        f"{before['error']:.3f}",
        f"{before['divergence']:.3f}" if "divergence" in before else "",
        *("" if side is None else f"{side:.1f}" for side in sides),
    ]


def _recall(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield "### A Llama that recalls from 40 tokens back, window 16"
    yield ""
    yield from _table(
        ("model", "accuracy"), ([row["model"], f"{row['accuracy']:.1%}"] for row in rows)
    )


def _scaling(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield "### One step of transfer against its length"
    yield ""
    yield (
        f"A Llama of {rows[0]['layers']} layers and width 256, one sequence; memory beyond what the"
        " model takes."
    )
    yield ""
    yield from _table(
        ("tokens", "backward", "seconds", "µs per token", "MiB"),
        (
            [
                f"{row['tokens']:,}",
                row["backward"],
                f"{row['seconds']:.2f}",
                f"{row['seconds'] / row['tokens'] * 1e6:.0f}",
                f"{row['bytes'] / 2**20:.0f}",
            ]
            for row in rows
        ),
    )


def _generation(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield "### Generation"
    yield ""
    yield (
        "The Llama of text with a window of 16, and with its softmax, by `fastweights linearize"
        " bench` on one thread:"
    )
    yield ""
    yield from _table(
        (
            "model",
            "sequences",
            "generated tokens",
            "seconds",
            "ms per token at the end",
            "state, MiB",
        ),
        (
            [
                row["contender"],
                f"{row['batch']}",
                f"{row['tokens']:,}",
                f"{row['seconds']:.1f}",
                f"{1e3 * row['last']:.1f}",
                f"{row['state_bytes'] / 2**20:.2f}",
            ]
            for row in rows
        ),
    )
    yield ""
    yield "![throughput, time and state](measured/linearize_generation.png)"


def _table(head: Sequence[str], rows: Iterator[list[str]] | Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(['---'] + ['---:'] * (len(head) - 1))}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
