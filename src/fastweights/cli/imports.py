"""fastweights import"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from fastweights.importers import FAMILIES, import_model, locate_checkpoint, tokenizer_files
from fastweights.runs.checkpoint import no_progress_bars
from fastweights.runs.files import atomic_folder

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def imports(parser: ArgumentParser) -> Callable[[Namespace, Console], None]:
    """Make a model that others have trained one of ours, with its tokenizer."""
    parser.add_argument(
        "model",
        help=f"folder or name on the Hugging Face hub; of type {', '.join(sorted(FAMILIES))}",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write, which must not exist"
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        metavar="|".join(DTYPES),
        help="of the weights (default: as they are)",
    )
    return _import


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ArgumentTypeError(f"{name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _import(chosen: Namespace, console: Console) -> None:
    if chosen.out.exists():
        raise ValueError(f"{chosen.out} exists; remove it or write elsewhere")
    source = locate_checkpoint(chosen.model)
    with no_progress_bars(), Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tensors")
        model = import_model(
            source, chosen.dtype, lambda done, of: bar.update(task, completed=done, total=of)
        )
    with no_progress_bars(), atomic_folder(chosen.out.resolve()) as folder:
        model.save_pretrained(folder)
        for path in tokenizer_files(source):
            shutil.copyfile(path, folder / path.name)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters in {chosen.out}", soft_wrap=True, markup=False)
