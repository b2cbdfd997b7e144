"""The model card of a conversion: README.md in the folder of the result, one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, hf_hub_download, metadata_load

from fastweights.environment import commit
from fastweights.linearize.evaluate.comparison import (
    EQUAL_STATE,
    LINEAR,
    SOFTMAX,
    WINDOW_ONLY,
    modes_in,
)
from fastweights.linearize.evaluate.judgement import percent_with_interval, share_in_words
from fastweights.render.markdown import table
from fastweights.render.units import bytes_in_words, layers_in_words
from fastweights.training.loop.files import read_json

PACKAGES = ("fastweights", "torch", "transformers")
RECALLED = 0.9
"""Of what softmax recalls; below, a distance counts among what a model is not good at."""


def model_card(run: Path, model_type: str, layers: Sequence[int]) -> str:
    """Write the card of a conversion: what it is, how good, how it was made, and how to load it.

    Nothing in it depends on when or where it is written.

    Args:
        run: The run's folder, whose JSON files hold the numbers.
        model_type: Type of the result, such as "linearized_llama".
        layers: The layers that are linear.

    Returns:
        Markdown behind a front matter of YAML, as Hugging Face's hub reads it.
    """
    record, planned = read_json(run / "run.json"), read_json(run / "plan.json")
    evaluation = read_json(run / "evaluation.json")
    name = _name(record["model"])
    parts = (
        f"# {name}, linearized",
        _what_it_is(name, planned, layers),
        _how_to_load(),
        "## How good it is",
        _table_of_modes(evaluation),
        share_in_words(evaluation) + " The share is (window only − this model) / (window only −"
        " softmax), in nats per token.",
        *_recall(evaluation["recall"]),
        "## What it is not good at",
        "\n".join(f"- {weakness}" for weakness in _weaknesses(evaluation, record)),
        "## Memory",
        _memory(evaluation),
        "## How it was made",
        _how_it_was_made(record),
    )
    body = "\n\n".join(parts)
    return f"---\n{_metadata(record['model'], model_type).to_yaml()}\n---\n\n{body}\n"


def _metadata(source: str, model_type: str) -> ModelCardData:
    base = _base_metadata(source)
    licence = {key: value for key, value in base.items() if key.startswith("license")}
    languages = {"language": base["language"]} if "language" in base else {}
    return ModelCardData(
        base_model=_name(source),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["linearized", "linear-attention", "fastweights", model_type],
        **languages,
        **licence,
    )


def _base_metadata(source: str) -> Mapping[str, Any]:
    """What the base model's card states, if it has one that can be had."""
    card = Path(source) / "README.md"
    if not card.parent.is_dir():
        try:
            card = Path(hf_hub_download(source, card.name))
        except (OSError, ValueError):  # none there, nobody to ask, or no name on the hub
            return {}
    return (metadata_load(card) or {}) if card.is_file() else {}


def _name(source: str) -> str:
    """The name on the hub, or that of the folder, whose path is nobody's business; a run's is its
    own and not that of ``model`` in it."""
    if not Path(source).is_dir():
        return source
    folder = Path(source).resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def _what_it_is(name: str, planned: Mapping[str, Any], layers: Sequence[int]) -> str:
    candidates = [attention["layer"] for attention in planned["converted"]]
    kept = sorted({*candidates, *(layer for layer, _ in planned["left"])} - set(layers))
    rest = f", softmax attention in {layers_in_words(kept)}" if kept else ""
    return (
        f"{name} ({planned['model_type']}, {planned['parameters']:,} parameters) with linear"
        f" attention in {layers_in_words(layers)}{rest}."
    )


def _how_to_load() -> str:
    return """```python
import fastweights  # pip install fastweights; or trust_remote_code=True beside it
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH OR NAME OF THIS FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH OR NAME OF THIS FOLDER")
```"""


def _title(mode: str) -> str:
    return "this model" if mode == LINEAR else mode


def _table_of_modes(evaluation: Mapping[str, Any]) -> str:
    columns = ("", "perplexity", "nats per token", "KL to softmax", "same likeliest token")
    lines = (
        (
            _title(name),
            f"{row['perplexity']:.4g}",
            f"{row['nats_per_token']:.4f}",
            f"{row['kl']:.4f}",
            f"{row['agreement']:.1%}",
        )
        for name, row in modes_in(evaluation).items()
    )
    return f"On held-out text:\n\n{table(columns, lines)}"


def _recall(recall: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Accuracy by distance, if it was measured."""
    if not recall:
        return
    modes = [mode for mode in (SOFTMAX, LINEAR, EQUAL_STATE, WINDOW_ONLY) if mode in recall[0]]
    lines = (
        (
            f"{row['distance']:,}{'*' * row['beyond_training']}",
            *(f"{row[mode]['accuracy']:.1%}" for mode in modes),
            "undefined" if row["share"] is None else percent_with_interval(row),
        )
        for row in recall
    )
    beyond = "; * longer than the sequences of training"
    yield (
        "Recall of passages of held-out text that are repeated so many tokens later (accuracy of"
        f" tokens{beyond * any(row['beyond_training'] for row in recall)}):"
    )
    yield table(("distance", *map(_title, modes), "share"), lines)


def _weaknesses(evaluation: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[str]:
    for row in evaluation["recall"]:
        softmax, linear = row[SOFTMAX]["accuracy"], row[LINEAR]["accuracy"]
        if linear < RECALLED * softmax:
            yield (
                f"Recall from {row['distance']:,} tokens back: {linear:.1%} of the tokens, where"
                f" softmax has {softmax:.1%}."
            )
    measured = [row["distance"] for row in evaluation["recall"]]
    reach = f"beyond {max(measured):,} tokens" if measured else "from any distance"
    yield f"Recall {reach} was not measured."
    yield f"It was trained on sequences of {record['data']['length']:,} tokens."
    yield (
        f"Below {evaluation['break_even']:,} tokens its linear layers take more memory than the"
        " keys and values that they replace."
    )


def _memory(evaluation: Mapping[str, Any]) -> str:
    lines = (
        (f"{row['tokens']:,}", *(bytes_in_words(row[mode]) for mode in (SOFTMAX, LINEAR)))
        for row in evaluation["memory"]
    )
    return "Of one sequence's cache:\n\n" + table(("tokens", "softmax", "this model"), lines)


def _how_it_was_made(record: Mapping[str, Any]) -> str:
    length = record["data"]["length"]
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    revision = commit()
    texts = ", ".join(_source(source) for source in record["data"]["sources"])
    lines = [
        ("linear attention", _words(record["recipe"]["analog"])),
        *(_stage(stage, length) for stage in record["recipe"]["stages"]),
        ("text", f"{texts}; seed {record['seed']}"),
        ("versions", versions + ("" if revision is None else f"; commit {revision}")),
    ]
    return table(("", ""), lines)


def _source(source: str) -> str:
    return source if source.startswith("hub:") else Path(source).name


def _stage(stage: Mapping[str, Any], length: int) -> tuple[str, str]:
    fit = stage["fit"]
    size = stage.get("length") or length
    tokens = fit["steps"] * fit["batch"] * fit["accumulate"] * size
    optimizer = fit["optimizer"]
    rest = {key: value for key, value in stage.items() if key not in ("fit", "name", "length")}
    return stage["name"], (
        f"{fit['steps']:,} steps, {tokens:,} tokens in sequences of {size:,};"
        f" {optimizer['type']} at {optimizer['lr']:g}; {_words(rest)}"
    )


def _words(settings: Mapping[str, Any]) -> str:
    """Settings in words, those that are off left out."""
    return ", ".join(
        f"{key} {_word(value)}"
        for key, value in settings.items()
        if key != "type" and value not in (None, False, 0, 0.0, [], "")
    )


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_words(value)})"
    return "yes" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
