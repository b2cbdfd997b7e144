"""docs/linearize-measured.md: what linearized models lose and win."""

from __future__ import annotations

from html import escape
from itertools import cycle
from math import exp
from statistics import mean, median
from textwrap import shorten
from typing import Any

from fastweights.lab.bench.linearized import plot_generation
from fastweights.linearize.evaluate.generation import GenerationRow
from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend_beside, logarithmic, png
from pages.page import Page, Row, origin, results, rows_of


def far_machine() -> str:
    return f"{origin('linearize_far')}. Other programs kept it busy."


def needs() -> str:
    lines = (
        [
            row["group"],
            "softmax" if row["window"] is None else f"the last {row['window']} tokens",
            f"{row['all']['nats']:.2f}",
            f"{row['recalled']['nats']:.2f}",
            *(f"{row[band]['accuracy']:.0%}" for band in ("recalled", *_BANDS)),
        ]
        for row in rows_of("linearize_far")
    )
    columns = ("teacher", "attends to", "nats, all", "nats, recalled", "accuracy, recalled")
    return table((*columns, *_BANDS), lines)


_BANDS = ("16-63", "64-127", "128-255", "256-511")


def recipes() -> str:
    named: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows_of("linearize_table", tuning=False):
        key = row["teacher"], row["softmax_layers"], row["method"]
        named.setdefault(key, []).append(row)
    teachers = list(dict.fromkeys(teacher for teacher, *_ in named))
    in_order = sorted(named, key=lambda name: (teachers.index(name[0]), name[1]))
    columns = ("teacher", "recipe", "rate", "tokens", "perplexity / softmax", "share", "recalled")
    machine = f"{origin('linearize_table')}. Other programs kept it busy."
    columns = (*columns, *_back(TABLE_BANDS), "state", "minutes")
    return f"{machine}\n\n{table(columns, (_recipe(named[name]) for name in in_order))}"


def _recipe(rows: list[Row]) -> list[str]:
    """One recipe for one teacher, by its seeds."""
    first = rows[0]
    state = first["state_bytes"]
    rate = "" if first["lr"] is None else f"{first['lr']:g}"
    return [
        *(first["teacher"], _recipe_name(first), rate, f"{first['tokens']:,}"),
        *_beside_softmax(rows, TABLE_BANDS),
        f"{state['linear'] / 2**10:.0f} KiB of {state['softmax'] / 2**10:,.0f}",
        f"{median(row['seconds'] for row in rows) / 60:.1f}",
    ]


def _recipe_name(row: Row) -> str:
    """With the layers that stay softmax, if there are any."""
    kept = row["softmax_layers"]
    return row["method"] + (f", {kept} softmax layer" + "s" * (kept > 1) if kept else "")


def ablations() -> str:
    by_name: dict[tuple[str, str], list[Row]] = {}
    for row in rows_of("linearize_ablations"):
        by_name.setdefault((row["teacher"], row["method"]), []).append(row)
    columns = ("teacher", "changed", "perplexity / softmax", "share", "recalled")
    columns = (*columns, *_back(ABLATION_BANDS), "state")
    return table(columns, map(_ablation, by_name.values()))


def _ablation(rows: list[Row]) -> list[str]:
    """One change for one teacher."""
    first = rows[0]
    return [
        *(first["teacher"], first["method"], *_beside_softmax(rows, ABLATION_BANDS)),
        f"{first['state_bytes'] / 2**10:.0f} KiB",
    ]


TABLE_BANDS, ABLATION_BANDS = ("256-511", "1024-2047"), ("256-511",)
"""The distances that tables have."""


def _back(bands: tuple[str, ...]) -> list[str]:
    return [f"{band} back" for band in bands]


def _beside_softmax(rows: list[Row], bands: tuple[str, ...]) -> list[str]:
    """Perplexity, the share, and what is recalled, from any distance and from those of `bands`."""
    return [
        _spread([exp(row["linear"] - row["softmax"]) for row in rows], "{:.3f}"),
        _spread([row["share"] for row in rows if row["share"] is not None], "{:.0%}"),
        *(_recall_of(rows, band) for band in ("recalled", *bands)),
    ]


def _recall_of(rows: list[Row], band: str) -> str:
    """Of the teacher's accuracy, where text has such distances."""
    if band not in rows[0].get("recalled", {}).get("softmax", {}):
        return ""
    softmax = rows[0]["recalled"]["softmax"][band]
    found = _spread([row["recalled"]["linear"][band] for row in rows], "{:.0%}")
    return f"{found} of {softmax:.0%}"


def _spread(values: list[float], form: str) -> str:
    """The median, with the least and the largest."""
    if not values:
        return "undefined"
    least, middle, largest = (form.format(x) for x in (min(values), median(values), max(values)))
    return middle if least == largest else f"{middle} ({least}…{largest})"


def pretrained() -> str:
    rows = _pretrained_rows()
    columns = ("model", "attends by", "tokens trained", "softmax layers", "state, MiB")
    columns = (
        *columns,
        "WikiText-2",
        "book",
        "its nats to 256, 1,024, 4,096",
        "LAMBADA",
        "SQuAD",
        "numbers found",
        "at 2,048",
        "minutes",
        "commit",
    )
    machine, _, versions = origin(PRETRAINED[-1]).partition("; ")[2].partition("; ")
    cpu = machine.partition(",")[0]
    lines = table(columns, map(_pretrained, sorted(rows, key=_by_state)))
    return f"All with: {cpu}; {versions}; {_dtype(PRETRAINED[-1])}.\n\n{lines}"


def _pretrained_rows() -> list[Row]:
    answered = {_of(row): row["squad"] for name in ANSWERS for row in rows_of(name)}
    return [
        {**row, "squad": answered.get(_of(row)), "commit": results(name)["header"]["commit"][:9]}
        for name in PRETRAINED
        for row in rows_of(name)
    ]


def _of(row: Row) -> tuple[Any, ...]:
    """What a row measures."""
    return tuple(row[name] for name in ("model", "method", "tokens", "attention"))


ANSWERS = (
    "linearize_pretrained_answers",
    "linearize_pretrained_more_answers",
    "linearize_pretrained_streaming_answers",
)
"""Files of answers to SQuAD's questions, of some of the rows; StreamingLLM's are in the last."""


PRETRAINED = (
    "linearize_pretrained",
    "linearize_pretrained_trained",
    "linearize_pretrained_gemma",
    "linearize_pretrained_recall",
    "linearize_pretrained_layers",
    "linearize_pretrained_books",
    "linearize_pretrained_budget",
    "linearize_pretrained_budget_recall",
    "linearize_pretrained_more",
    "linearize_pretrained_windows",
    "linearize_pretrained_features",
    "linearize_pretrained_students",
    "linearize_pretrained_whole",
    "linearize_pretrained_far_recall",
)
"""Files of results, the last measured last."""


def _dtype(name: str) -> str:
    return results(name)["header"]["settings"]["dtype"]


def _by_state(row: Row) -> tuple[Any, ...]:
    """SmolLM2 first, of each model softmax, then from the largest state to the smallest,
    StreamingLLM's before others."""
    attention = row["attention"]
    smaller = row["model"] != SMOLLM2, row["model"]
    return *smaller, attention != SOFTMAX, -row["state"], attention != STREAMING, row["tokens"]


SMOLLM2 = "smollm2"
SOFTMAX, STREAMING = "softmax", "StreamingLLM"


def _pretrained(row: Row) -> list[str]:
    found, is_softmax = row["needles"], row["attention"] == SOFTMAX
    converted = not is_softmax and row["attention"] != STREAMING
    return [
        *(row["model"], _attention(row), f"{row['tokens']:,}" if converted else ""),
        "all" if is_softmax else f"{row['softmax_layers']}",
        "grows" if is_softmax else f"{row['state'] / 2**20:.2f}",
        *(f"{row[name]:.2f}" for name in ("wikitext", "book")),
        ", ".join(f"{nats:.2f}" for nats in row["book_by_position"]),
        f"{row['lambada']:.0%}",
        "" if row["squad"] is None else f"{row['squad']:.0%}",
        f"{found['mean']:.0%}",
        f"{mean(found['accuracy'][-1]):.0%}",
        f"{row['seconds'] / 60:.1f}" if converted else "",
        row["commit"],
    ]


def _attention(row: Row) -> str:
    """How a row attends, with whose softmax layers StreamingLLM does."""
    _, _, layers = row["method"].partition(", ")
    beside = row["attention"] == STREAMING and row["softmax_layers"] and layers
    return f"{row['attention']}, {layers}" if beside else row["attention"]


def chats() -> str:
    """Each question with all answers."""
    rows = sorted(rows_of(CHATS), key=_by_state)
    turns = zip(*(row["chat"] for row in rows), strict=True)
    said = (
        f"> {turn[0]['question']}\n\n"
        + table(
            ("attends by", "answer"),
            (
                (_talker(row), _in_a_cell(one["answer"]))
                for row, one in zip(rows, turn, strict=True)
            ),
        )
        for turn in turns
    )
    return "\n\n".join((f"{origin(CHATS)}.", *said))


CHATS = "linearize_pretrained_chats"


def _talker(row: Row) -> str:
    state = "" if row["attention"] == SOFTMAX else f", {row['state'] / 2**20:.1f} MiB"
    trained = f", {row['tokens']:,} tokens" if row["tokens"] else ""
    return f"{_attention(row)}{trained}{state}"


def _in_a_cell(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return escape(shorten(line, SHOWN, placeholder=" …"), quote=False) or "(nothing)"


SHOWN = 140
"""Characters of an answer."""


def pretrained_picture() -> bytes:
    """Perplexity of SmolLM2 over the bytes of the state; filled where something was trained."""
    rows = [
        row for row in _pretrained_rows() if row["model"] == SMOLLM2 and not row["softmax_layers"]
    ]
    names = list(dict.fromkeys(_series(row) for row in rows if row["attention"] != SOFTMAX))
    drawing, axes = canvas(1, 2, 4.4, 3.2)
    for panel, (field, title) in zip(axes[0], TEXTS.items(), strict=True):
        (softmax,) = {row[field] for row in rows if row["attention"] == SOFTMAX}
        panel.axhline(softmax, color="black", linewidth=0.8, linestyle="--", label=SOFTMAX)
        for name, color in zip(names, cycle(PALETTE)):
            own = sorted((r for r in rows if _series(r) == name), key=lambda row: row["state"])
            states, values = ([one[key] for one in own] for key in ("state", field))
            fills = [color if one["tokens"] and name != STREAMING else "none" for one in own]
            sizes = [state / 2**20 for state in states]
            panel.scatter(sizes, values, 28, c=fills, edgecolors=color, label=name, zorder=3)
            if name == STREAMING:
                panel.plot(sizes, values, color=color, linewidth=0.8)
        label(panel, title, "state of one sequence [MiB]", "perplexity")
        logarithmic(panel)
    legend_beside(axes[0, 1])
    return png(drawing)


def _series(row: Row) -> str:
    """How a row attends, whatever its bytes."""
    return row["attention"].partition(" in ")[0].partition(", windows of")[0]


TEXTS = {"wikitext": "WikiText-2, sequences of 1,024", "book": "Moby-Dick, its first 4,096"}


def generation() -> str:
    both: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows_of("linearize_generation"):
        both.setdefault((row["batch"], row["tokens"]), {})[row["contender"]] = row
    columns = ("sequences", "generated tokens", "seconds", "ms per token at the end", "state, MiB")
    return table(columns, (_generated(*size, rows) for size, rows in both.items()))


def _generated(batch: int, tokens: int, rows: dict[str, Row]) -> list[str]:
    """The linear model / its softmax."""
    linear, softmax = rows["linear"], rows["softmax"]
    return [
        f"{batch}",
        f"{tokens:,}",
        f"{linear['seconds']:.1f} / {softmax['seconds']:.1f}",
        f"{1e3 * linear['last']:.1f} / {1e3 * softmax['last']:.1f}",
        f"{linear['state_bytes'] / 2**20:.2f} / {softmax['state_bytes'] / 2**20:.2f}",
    ]


def generation_picture() -> bytes:
    kept = ("group", "type")
    rows = [
        GenerationRow(**{name: value for name, value in row.items() if name not in kept})
        for row in rows_of("linearize_generation")
    ]
    return png(plot_generation(rows))


PAGE = Page(
    "linearize-measured",
    (far_machine, needs, recipes, ablations, pretrained, chats, generation),
    {
        "linearize_generation.png": generation_picture,
        "linearize_pretrained.png": pretrained_picture,
    },
)
