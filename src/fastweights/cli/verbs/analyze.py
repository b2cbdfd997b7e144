"""fastweights analyze"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from fastweights.analysis.profile import Profile, ProfileLimits, profile
from fastweights.analysis.report import write_report
from fastweights.analysis.theory import findings
from fastweights.cli.load import load_model
from fastweights.models import FastWeightsForCausalLM


def analyze(chosen: Namespace, console: Console) -> None:
    """Write a page about models, or about the papers' theorems."""
    if chosen.models and chosen.text is None:
        raise ValueError("models are analyzed on a text; name a file by --text FILE")
    limits = ProfileLimits(heads=chosen.heads, window=chosen.window)
    profiles = []
    for name, source in zip(_names(chosen.models), chosen.models, strict=True):
        console.print(f"{name} …")
        profiles.append(
            _profile_source(
                name, source, chosen.text.read_text(encoding="utf-8"), chosen.tokens, limits
            )
        )
    page = write_report(profiles, [] if profiles else findings(), chosen.out)
    console.print(f"{page}", soft_wrap=True)


def _profile_source(
    name: str, source: str, text: str, tokens: int, limits: ProfileLimits
) -> Profile:
    model, tokenizer = load_model(source, torch.device("cpu"))
    if not isinstance(model, FastWeightsForCausalLM):
        raise ValueError(
            f"{source} is a {model.config.model_type} model, which is not analyzed; convert it by"
            " `fastweights import` first"
        )
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; {name} needs two at least to analyze")
    return profile(name, model, torch.tensor([ids]), limits)


def _names(sources: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole of it where two would be called the same."""
    last = [Path(source).name or source for source in sources]
    return [
        name if last.count(name) == 1 else source
        for name, source in zip(last, sources, strict=True)
    ]
