"""fastweights import, fastweights quantize: a model in a new folder, with its tokenizer"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from fastweights.cli.load import (
    load_config,
    load_weights,
    require_floats,
    rounded_bits,
    rounded_source,
)
from fastweights.importers import import_model, locate_checkpoint, tokenizer_files
from fastweights.importers.gguf import is_gguf
from fastweights.render.units import bytes_in_words
from fastweights.training.loop.checkpoint import model_source, no_progress_bars
from fastweights.training.loop.files import atomic_folder


def import_model_folder(chosen: Namespace, console: Console) -> None:
    """Write another library's model as one of ours."""
    _require_new(chosen.out)
    source = locate_checkpoint(model_source(chosen.model))
    require_floats(chosen.model, load_config(source))
    dtype = None if chosen.dtype is None else getattr(torch, chosen.dtype)
    with no_progress_bars(), Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tensors")
        model = import_model(
            source, dtype, lambda done, of: bar.update(task, completed=done, total=of)
        )
    _write(model, source, chosen.out)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters in {chosen.out}", soft_wrap=True)


def quantize_model_folder(chosen: Namespace, console: Console) -> None:
    """Write a model with weights of few bits, which are rounded while they are read."""
    bits = rounded_bits(chosen)
    if bits is None:
        raise ValueError("say how weights are rounded: --int8 or --int4")
    _require_new(chosen.out)
    if not is_gguf(chosen.model):
        require_floats(chosen.model, load_config(chosen.model))
    source = rounded_source(chosen.model, bits)
    device, shown = torch.device("cpu"), console.is_terminal
    model = load_weights(source, device, bits=bits, shown=shown)
    _write(model, locate_checkpoint(model_source(source)), chosen.out)
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    size = bytes_in_words(sum(each.nbytes for each in tensors.values()))
    console.print(f"{size} of weights in {chosen.out}", soft_wrap=True)


def _require_new(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists; remove it or write elsewhere")


def _write(model: Any, source: Path, out: Path) -> None:
    """The model, and the tokenizer of what it was made from."""
    with no_progress_bars(), atomic_folder(out.resolve()) as folder:
        model.save_pretrained(folder)
        for path in tokenizer_files(source):
            shutil.copyfile(path, folder / path.name)
