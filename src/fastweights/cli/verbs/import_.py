"""fastweights import"""

from __future__ import annotations

import shutil
from argparse import Namespace

import torch
from rich.console import Console
from rich.progress import Progress

from fastweights.importers import import_model, locate_checkpoint, tokenizer_files
from fastweights.training.loop.checkpoint import model_source, no_progress_bars
from fastweights.training.loop.files import atomic_folder


def import_model_folder(chosen: Namespace, console: Console) -> None:
    """Write another library's model as one of ours."""
    if chosen.out.exists():
        raise ValueError(f"{chosen.out} exists; remove it or write elsewhere")
    source = locate_checkpoint(model_source(chosen.model))
    dtype = None if chosen.dtype is None else getattr(torch, chosen.dtype)
    with no_progress_bars(), Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tensors")
        model = import_model(
            source, dtype, lambda done, of: bar.update(task, completed=done, total=of)
        )
    with no_progress_bars(), atomic_folder(chosen.out.resolve()) as folder:
        model.save_pretrained(folder)
        for path in tokenizer_files(source):
            shutil.copyfile(path, folder / path.name)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters in {chosen.out}", soft_wrap=True)
