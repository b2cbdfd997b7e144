"""Files and folders written atomically: they exist whole or not at all, even if the machine
stops."""

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
    """Yield a new folder to fill, which replaces `target` when the block ends without an error."""
    partial = partial_path(target)
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
    """Yield a path to write to; the file replaces `target` when the block ends without an error."""
    partial = partial_path(target)
    yield partial
    sync(partial)
    partial.replace(target)
    sync(target.parent)


def write_json(path: Path, content: object) -> None:
    """Write a file of one JSON value atomically, unescaped and with one value per line."""
    with atomic_file(path) as new:
        new.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read the value of a JSON file.

    Raises:
        CheckpointError: If the file is damaged.
        FileNotFoundError: If there is no such file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it, or choose another folder"
        ) from error


def remove_folder(folder: Path) -> None:
    """Remove a folder at once: it is never seen half removed under its name."""
    if folder.exists() and not folder.name.endswith(PARTIAL):
        doomed = folder.with_name(f".{folder.name}.old{PARTIAL}")
        remove_folder(doomed)
        folder = folder.rename(doomed)
    shutil.rmtree(folder, ignore_errors=True)


def remove_partials(folder: Path) -> None:
    """Remove what an interrupted `atomic_folder`, `atomic_file` or `remove_folder` left in
    `folder`."""
    for path in folder.glob(f".*{PARTIAL}"):
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_path(target: Path) -> Path:
    """Return where a file or folder is while it is not whole."""
    return target.with_name(f".{target.name}{PARTIAL}")
