"""fastweights export"""

from __future__ import annotations

import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import nn

from fastweights.cli.load import load_as_own, load_config, load_weights, require_floats
from fastweights.cli.progress import reporter
from fastweights.engines.aoti import require_compiler, write_package
from fastweights.engines.exported.linearized import require_graph
from fastweights.engines.exported.program import Exported
from fastweights.engines.onnx import DOMAINS, require_onnx, write_onnx
from fastweights.importers import export_model, tokenizer_files
from fastweights.importers.export import require_family
from fastweights.linearize.convert.attention_layers import PREFIX
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.loop.checkpoint import model_folder, no_progress_bars
from fastweights.training.loop.files import atomic_folder
from fastweights.training.loop.report import Reporter, WorkDone

FILES = {".onnx": "an ONNX graph", ".pt2": "a package of compiled programs"}
"""What is written as a file, by how its name ends."""
OTHERS = {".bin", ".ckpt", ".gguf", ".h5", ".ort", ".pt", ".pth", ".safetensors", ".so", ".tflite"}
"""Ends of files that are not written, and that no one means a folder by."""


def export_model_folder(chosen: Namespace, console: Console) -> None:
    """Write one of our models as another library's, as an ONNX graph or as compiled programs."""
    _require_fitting(chosen)
    source = model_folder(chosen.checkpoint)
    _require_exported(chosen, load_config(source))
    if chosen.out.suffix in FILES:
        _require_own_tokenizer(source, chosen.out)
        (require_onnx if chosen.out.suffix == ".onnx" else require_compiler)()
    with no_progress_bars():
        model = _load(source)
        if chosen.out.suffix in FILES:
            _write_file(model, source, chosen, console)
        else:
            _write_folder(model, source, chosen, console)


def _require_fitting(chosen: Namespace) -> None:
    """Raise where options do not fit what is written."""
    out, suffix = chosen.out, chosen.out.suffix
    if out.exists():
        raise ValueError(f"{out} exists; remove it or write elsewhere")
    if suffix in OTHERS:
        raise ValueError(
            f"{out} ends in {suffix}, which export does not write: a file that ends in"
            f" {' or '.join(FILES)}, or a folder of another library's model"
        )
    if suffix in FILES and chosen.family is not None:
        raise ValueError(
            f"--family is of models in folders, and a file that ends in {suffix} is"
            f" {FILES[suffix]}; leave one of them out"
        )
    if chosen.domain is not None and suffix != ".onnx":
        raise ValueError(
            f"--domain is of ONNX graphs; write to a file that ends in .onnx, not to {out}"
        )


def _require_exported(chosen: Namespace, config: Any) -> None:
    """Raise for a model that is not exported, before its weights are read."""
    require_floats(chosen.checkpoint, config)
    if chosen.out.suffix in FILES:
        if _is_linearized(config):
            require_graph(config)
    elif _is_linearized(config):
        raise ValueError(
            f"{chosen.checkpoint} is a {config.model_type}, which transformers reads as it is; give"
            f" a file that ends in {' or '.join(FILES)}, or export the softmax model that it was"
            " made from"
        )
    elif isinstance(config, FastWeightsConfig):
        require_family(config, chosen.family)


def _is_linearized(config: Any) -> bool:
    return config.model_type.startswith(PREFIX)


def _load(source: str | Path) -> Any:
    load = load_weights if _is_linearized(load_config(source)) else load_as_own
    return load(source, torch.device("cpu"))


def _require_own_tokenizer(source: Path, out: Path) -> None:
    """Raise if the folder of a file has another model's tokenizer."""
    for path in tokenizer_files(source):
        there = out.parent / path.name
        if there.exists() and there.read_bytes() != path.read_bytes():
            raise ValueError(
                f"{there} is not the tokenizer of {source}, which is written beside it;"
                " remove it or write elsewhere"
            )


def _write_file(model: Exported, source: Path, chosen: Namespace, console: Console) -> None:
    out = chosen.out.resolve()
    nearest = next(parent for parent in out.parents if parent.exists())
    with TemporaryDirectory(dir=nearest) as folder:
        written = Path(folder, out.name)
        with reporter(console) as shown, tell_layers(model, shown):
            if out.suffix == ".pt2":
                write_package(model, written, shown.note)
                said = "prefill and decode, compiled for this machine's processor"
            else:
                domain = DOMAINS[chosen.domain or "com.microsoft"]
                counts = write_onnx(model, written, domain, shown.note)
                said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        for path in tokenizer_files(source):
            shutil.copyfile(path, Path(folder, path.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = [path for path in Path(folder).iterdir() if path != written]
        for path in (*beside, written):  # the file last: once it is there, all is
            path.replace(out.parent / path.name)
    console.print(f"{chosen.out}, with {said or 'plain operators alone'}", soft_wrap=True)


@contextmanager
def tell_layers(model: nn.Module, shown: Reporter) -> Iterator[None]:
    """Tell a reporter of every layer of `model` that is traced, for the length of a block."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers, began = max(lists, key=len), time.monotonic()

    def tell(number: int, *_: object) -> None:
        nonlocal began
        if torch.compiler.is_compiling():
            began = began if number else time.monotonic()
            seconds = time.monotonic() - began
            shown.phase(WorkDone("tracing layers", number, len(layers), seconds))

    hooks = [
        layer.register_forward_pre_hook(partial(tell, number))
        for number, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
    )
