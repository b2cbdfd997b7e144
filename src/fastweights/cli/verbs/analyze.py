"""fastweights analyze"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from fastweights.analysis.profile import Profile, ProfileLimits, mixer_records, profile
from fastweights.analysis.report import write_report
from fastweights.analysis.theory import findings
from fastweights.cli.load import load_as_own, load_config, load_weights, require_tokenizer
from fastweights.cli.progress import reporter
from fastweights.linearize.convert.attention_layers import PREFIX
from fastweights.linearize.evaluate.records import branch_records
from fastweights.training.data.corpus import tokenize_sources
from fastweights.training.loop.report import follow


def analyze(chosen: Namespace, console: Console) -> None:
    """Write a page about models, or about the papers' theorems."""
    if bool(chosen.models) != bool(chosen.text):
        raise ValueError(
            "models are analyzed on a text: fastweights analyze MODEL … --text SOURCE …, the models"
            " first"
        )
    profiles, refused = list[Profile](), list[ValueError | OSError]()
    for name, source in zip(_names(chosen.models), chosen.models, strict=True):
        console.print(f"{name} …")
        try:
            profiles.append(_profile_source(name, source, chosen, console))
        except (ValueError, OSError) as error:
            refused.append(error)
    if refused and not profiles:
        raise refused[0]
    page = write_report(profiles, [] if profiles else findings(), chosen.out)
    console.print(f"{page}", soft_wrap=True)
    if refused:
        raise ValueError(f"not on the page: {'; '.join(map(str, refused))}")


def _profile_source(name: str, source: str, chosen: Namespace, console: Console) -> Profile:
    limits = ProfileLimits(heads=chosen.heads, window=chosen.window)
    if load_config(source).model_type.startswith(PREFIX):
        model, capture = load_weights(source, torch.device("cpu")), branch_records
    else:
        model, capture = load_as_own(source, torch.device("cpu")), mixer_records
    tokens, _ = tokenize_sources(
        chosen.text, require_tokenizer(source), chosen.field, chosen.tokens
    )
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; {name} needs two at least to analyze")
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with reporter(console) as shown:
        return profile(name, model, ids, limits, capture, partial(follow, reporter=shown))


def _names(sources: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole of it where two would be called the same."""
    last = [Path(source).name or source for source in sources]
    return [
        name if last.count(name) == 1 else source
        for name, source in zip(last, sources, strict=True)
    ]
