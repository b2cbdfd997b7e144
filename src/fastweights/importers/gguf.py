"""GGUF files, by transformers' reader: folders of models in float32, each written once."""

from __future__ import annotations

import logging
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.environment import require_package
from fastweights.errors import CheckpointError, reason_of
from fastweights.render.units import bytes_in_words

GGUF = ".gguf"
"""What names of such files end in."""
_logger = logging.getLogger("fastweights")


def is_gguf(source: str | Path) -> bool:
    """Whether a name of a model is that of a GGUF file."""
    return Path(source).suffix.lower() == GGUF


def require_gguf(file: str | Path) -> None:
    """Check that a GGUF file is there, and what it is read with.

    Raises:
        ValueError: If either is missing.
    """
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}")
    require_package("gguf", f"{file}, a GGUF file,", "or name the model that it was made from")


@cache
def dequantize(file: Path) -> Path:
    """Return a folder with the model of a GGUF file in float32, in the cache of the Hugging Face
    hub, where it is written unless it is there; which is said in a line of the log.

    Raises:
        CheckpointError: If it cannot be read as a causal language model.
        ValueError: If there is no such file, or the package gguf is missing.
    """
    require_gguf(file)
    there = file.stat()
    version = f"{file.resolve()} {there.st_size} {there.st_mtime_ns}"
    folder = Path(HF_HOME, "fastweights", f"{file.stem}-{sha256(version.encode()).hexdigest()[:8]}")
    if not folder.exists():
        _write(file, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    _logger.warning("%s is dequantised: %s of float32 in %s", file, bytes_in_words(size), folder)
    return folder


def _write(file: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch, "model")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32
            )
        except Exception as error:  # whatever its readers raise at a file that they do not know
            raise CheckpointError(
                f"{file} cannot be read as a causal language model ({reason_of(error)})"
            ) from error
        vars(model.config).pop("quantization_config", None)  # what is written is not quantised
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
