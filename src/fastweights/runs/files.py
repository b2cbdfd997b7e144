"""Files and folders that are there whole or not at all, whenever the process or machine stops."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastweights.runs.errors import CheckpointError

PARTIAL = ".partial"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill; it takes the place of `target` when the block ends without an error."""
    partial = _partial(target)
    remove_folder(partial)
    partial.mkdir(parents=True)
    yield partial
    for path in partial.rglob("*"):
        sync(path)
    sync(partial)
    remove_folder(target)
    partial.rename(target)
    sync(target.parent)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A path to write; the file takes the place of `target` when the block ends without an
    error.
    """
    partial = _partial(target)
    yield partial
    sync(partial)
    partial.replace(target)
    sync(target.parent)


def write_json(path: Path, content: object) -> None:
    """A file of one JSON value, whole or not at all; characters as they are, one value a line."""
    with atomic_file(path) as new:
        new.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError: if the file is damaged.
        FileNotFoundError: if there is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it, or choose another folder"
        ) from error


def remove_folder(folder: Path) -> None:
    """Remove a folder such that no half of it is ever seen under its name."""
    if folder.exists() and not folder.name.endswith(PARTIAL):
        doomed = folder.with_name(f".{folder.name}.old{PARTIAL}")
        remove_folder(doomed)
        folder = folder.rename(doomed)
    shutil.rmtree(folder, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    """Remove what an interrupted `atomic_folder`, `atomic_file` or `remove_folder` left in
    `folder`.
    """
    for path in folder.glob(f".*{PARTIAL}"):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the operating system put a file's contents, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}{PARTIAL}")
