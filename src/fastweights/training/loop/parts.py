"""Tensors that processes have parts of, in files: written in the background, read into any parts.

The files are safetensors with the places of their parts, by torch.distributed.checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from fastweights.errors import CheckpointError

PARTS = "parts"
"""The folder, in a checkpoint, of such files."""


def write_parts(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> Future[Any]:
    """Copy this process's parts of tensors, and begin to write them; called by all processes.

    Args:
        tensors: The tensors, by names that are the same in every process.
        folder: A folder that is there, and that all processes see.
        group: The processes, in a group that no other communication uses.

    Returns:
        What is done when all processes have written.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    ordered = dict(sorted(tensors.items()))  # so that the same tensors make the same files
    found = async_save(ordered, storage_writer=writer, process_group=group)
    assert isinstance(found, Future)
    return found


def finish_behind(writing: Future[Any], made: ExitStack) -> Future[Any]:
    """Leave contexts in the background when writing has ended, with its error if it has failed."""

    def finish() -> None:
        with made:
            writing.result()

    one = ThreadPoolExecutor(1)
    try:
        return one.submit(finish)
    finally:
        one.shutdown(wait=False)


def read_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read from files what this process has of tensors, into them.

    Args:
        folder: Where `write_parts` wrote them, from any number of processes.
        tensors: What is read, whole or parts.

    Raises:
        CheckpointError: If a tensor is not there, or of another shape.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{folder} is not of this model ({reasons})") from error


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of every tensor in files that `write_parts` wrote."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: (stored.size, stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
