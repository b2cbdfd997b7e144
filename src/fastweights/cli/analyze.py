"""fastweights analyze"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer

from fastweights.analysis.profile import Profile, ProfileLimits, profile
from fastweights.analysis.report import write_report
from fastweights.analysis.theory import findings
from fastweights.cli.arguments import add_plugins
from fastweights.models import FastWeightsForCausalLM
from fastweights.runs.checkpoint import model_folder, no_progress_bars


def analyze(parser: ArgumentParser) -> Callable[[Namespace, Console], None]:
    """Models as dynamical systems and attention maps, side by side; without models, the papers'
    theory.
    """
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a run, a checkpoint or model folder, or a hub name",
    )
    parser.add_argument("--text", type=Path, help="the text to read (needed with models)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/analysis"), help="folder (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of the text, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=ProfileLimits.window,
        help="tokens of a map (default: %(default)s)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=ProfileLimits.heads,
        help="of a layer, at most (default: %(default)s)",
    )
    add_plugins(parser)
    return _analyze


def _analyze(chosen: Namespace, console: Console) -> None:
    if chosen.models and chosen.text is None:
        raise ValueError("analyze needs a text: --text FILE")
    extent = ProfileLimits(heads=chosen.heads, window=chosen.window)
    profiles = []
    for name, source in zip(_names(chosen.models), chosen.models, strict=True):
        console.print(f"{name} …")
        profiles.append(
            _profile_source(
                name, source, chosen.text.read_text(encoding="utf-8"), chosen.tokens, extent
            )
        )
    page = write_report(profiles, [] if profiles else findings(), chosen.out)
    console.print(f"{page}", soft_wrap=True)


def _profile_source(
    name: str, source: str, text: str, tokens: int, extent: ProfileLimits
) -> Profile:
    folder = model_folder(Path(source)) if Path(source).exists() else source
    with no_progress_bars():
        model = FastWeightsForCausalLM.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    return profile(name, model, torch.tensor([ids]), extent)


def _names(sources: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole of it where two would be called the same."""
    last = [Path(source).name or source for source in sources]
    return [
        name if last.count(name) == 1 else source
        for name, source in zip(last, sources, strict=True)
    ]
