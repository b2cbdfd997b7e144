"""fastweights export"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from fastweights.cli.load import load_weights
from fastweights.engines.onnx import DOMAINS, require_onnx, write_onnx
from fastweights.importers import export_model, tokenizer_files
from fastweights.models import FastWeightsForCausalLM
from fastweights.runs.checkpoint import model_folder, no_progress_bars
from fastweights.runs.files import atomic_folder


def export_model_folder(chosen: Namespace, console: Console) -> None:
    """Write one of our models as another library's, or as an ONNX graph."""
    if chosen.out.exists():
        raise ValueError(f"{chosen.out} exists; remove it or write elsewhere")
    as_onnx = chosen.out.suffix == ".onnx"
    if as_onnx and chosen.family is not None:
        raise ValueError(
            "--family is of models in folders, and a file that ends in .onnx is an ONNX graph;"
            " leave one of them out"
        )
    if chosen.domain is not None and not as_onnx:
        raise ValueError(
            f"--domain is of ONNX graphs; write to a file that ends in .onnx, not to {chosen.out}"
        )
    source = model_folder(chosen.checkpoint)
    if as_onnx:
        _require_own_tokenizer(source, chosen.out)
        require_onnx()
    with no_progress_bars():
        model = load_weights(source, torch.device("cpu"))
        if not isinstance(model, FastWeightsForCausalLM):
            raise ValueError(f"{source} holds a {type(model).__name__}, not a model of fastweights")
        if as_onnx:
            _write_graph(model, source, chosen, console)
        else:
            _write_folder(model, source, chosen, console)


def _require_own_tokenizer(source: Path, out: Path) -> None:
    """Raise if the folder of a graph has another model's tokenizer."""
    for path in tokenizer_files(source):
        there = out.parent / path.name
        if there.exists() and there.read_bytes() != path.read_bytes():
            raise ValueError(
                f"{there} is not the tokenizer of {source}, which is written beside the graph;"
                " remove it or write elsewhere"
            )


def _write_graph(
    model: FastWeightsForCausalLM, source: Path, chosen: Namespace, console: Console
) -> None:
    out = chosen.out.resolve()
    nearest = next(parent for parent in out.parents if parent.exists())
    with TemporaryDirectory(dir=nearest) as folder:
        written = Path(folder, out.name)
        counts = write_onnx(model, written, DOMAINS[chosen.domain or "com.microsoft"])
        for path in tokenizer_files(source):
            shutil.copyfile(path, Path(folder, path.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = [path for path in Path(folder).iterdir() if path != written]
        for path in (*beside, written):  # the graph last: once it is there, all is
            path.replace(out.parent / path.name)
    nodes = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    console.print(
        f"{chosen.out}, with {nodes or 'plain operators alone'}", soft_wrap=True, markup=False
    )


def _write_folder(
    model: FastWeightsForCausalLM, source: Path, chosen: Namespace, console: Console
) -> None:
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
