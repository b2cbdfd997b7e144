"""fastweights export"""

from __future__ import annotations

import shutil
from argparse import Namespace

import torch
from rich.console import Console

from fastweights.cli.load import load_weights
from fastweights.importers import export_model, tokenizer_files
from fastweights.models import FastWeightsForCausalLM
from fastweights.runs.checkpoint import model_folder, no_progress_bars
from fastweights.runs.files import atomic_folder


def export_model_folder(chosen: Namespace, console: Console) -> None:
    """Write one of our models as another library's."""
    if chosen.out.exists():
        raise ValueError(f"{chosen.out} exists; remove it or write elsewhere")
    source = model_folder(chosen.checkpoint)
    with no_progress_bars():
        model = load_weights(source, torch.device("cpu"))
        if not isinstance(model, FastWeightsForCausalLM):
            raise ValueError(f"{source} holds a {type(model).__name__}, not a model of fastweights")
        theirs = export_model(model, chosen.family)
        with atomic_folder(chosen.out.resolve()) as folder:
            theirs.save_pretrained(folder)
            for path in tokenizer_files(source):
                shutil.copyfile(path, folder / path.name)
    parameters = sum(p.numel() for p in theirs.parameters())
    console.print(
        f"{parameters:,} parameters as {theirs.config.model_type} in {chosen.out}",
        soft_wrap=True,
        markup=False,
    )
