"""fastweights analyze"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from fastweights.analysis.profile import Profile, ProfileLimits, profile
from fastweights.analysis.report import write_report
from fastweights.analysis.theory import findings
from fastweights.cli.load import load_model
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.data.corpus import tokenize_sources


def analyze(chosen: Namespace, console: Console) -> None:
    """Write a page about models, or about the papers' theorems."""
    if bool(chosen.models) != bool(chosen.text):
        raise ValueError(
            "models are analyzed on a text: fastweights analyze MODEL … --text SOURCE …, the models"
            " first"
        )
    limits = ProfileLimits(heads=chosen.heads, window=chosen.window)
    profiles = []
    for name, source in zip(_names(chosen.models), chosen.models, strict=True):
        console.print(f"{name} …")
        profiles.append(_profile_source(name, source, chosen, limits))
    page = write_report(profiles, [] if profiles else findings(), chosen.out)
    console.print(f"{page}", soft_wrap=True)


def _profile_source(name: str, source: str, chosen: Namespace, limits: ProfileLimits) -> Profile:
    model, tokenizer = load_model(source, torch.device("cpu"))
    if not isinstance(model, FastWeightsForCausalLM):
        raise ValueError(
            f"{source} is a {model.config.model_type} model, which is not analyzed; convert it by"
            " `fastweights import` first"
        )
    tokens, _ = tokenize_sources(chosen.text, tokenizer, chosen.field, chosen.tokens)
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; {name} needs two at least to analyze")
    return profile(name, model, torch.from_numpy(tokens.astype(np.int64))[None], limits)


def _names(sources: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole of it where two would be called the same."""
    last = [Path(source).name or source for source in sources]
    return [
        name if last.count(name) == 1 else source
        for name, source in zip(last, sources, strict=True)
    ]
