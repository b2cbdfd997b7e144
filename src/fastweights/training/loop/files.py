"""Files and folders written atomically: they exist whole or not at all, even if the machine
stops."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastweights.errors import CheckpointError, NoSpaceError
from fastweights.render.plots import png
from fastweights.render.units import bytes_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextmanager
def atomic_folder(target: Path, needs: int = 0) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces `target` when the block ends without an error.

    Args:
        target: The folder.
        needs: Bytes that it will take at least, if that is known.

    Raises:
        NoSpaceError: If there is no space for it; nothing of it is left then.
    """
    partial = partial_path(target)
    remove_folder(partial)
    with room_for(target, partial, needs):
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
    """Yield a path to write to; the file replaces `target` when the block ends without an error.

    Raises:
        NoSpaceError: If there is no space for it; nothing of it is left then.
    """
    partial = partial_path(target)
    with room_for(target, partial):
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.parent)


def write_json(path: Path, content: object) -> None:
    """Write a file of one JSON value atomically, with one value per line, and unescaped but for
    what UTF-8 cannot write, as in names of files that are not UTF-8."""
    with atomic_file(path) as new:
        text = json.dumps(content, indent=1, ensure_ascii=False)
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as PNG atomically."""
    with atomic_file(path) as new:
        new.write_bytes(png(figure))


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


def reserve(path: Path, size: int) -> None:
    """Make sure that a file has so many bytes on the disk: one that is mapped into memory could say
    nothing of a full one.

    Raises:
        NoSpaceError: If there is no space for them.
    """
    with room_for(path, path, size), path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, parts: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of these files in a folder, and of all in these folders in it, by their
    paths from there; what is missing is left out."""
    files = [path for part in parts for path in (part, *sorted(part.rglob("*")))]
    return {p.relative_to(folder).as_posix(): hash_file(p) for p in files if p.is_file()}


def find_damage(files: Mapping[Path, str]) -> set[Path]:
    """Return those of `files` that are missing or differ from their SHA-256."""
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda path: hash_file(path) if path.is_file() else None, files)
        pairs = zip(files.items(), found, strict=True)
        return {path for (path, digest), there in pairs if there != digest}


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def room_for(target: Path, partial: Path, needs: int = 0) -> Iterator[None]:
    """Say what it means if there is no space for what a block writes.

    Args:
        target: The file or folder.
        partial: Where it is written; what is there of it is removed then.
        needs: Bytes that it takes at least, if that is known.

    Raises:
        NoSpaceError: If there is no space.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        written = size_of(partial)
        partial.unlink() if partial.is_file() else remove_folder(partial)
        raise no_space(target, max(needs, written + 1)) from error


def no_space(target: Path, needs: int) -> NoSpaceError:
    """Make the error of a file or folder that needs so many bytes, at least."""
    there = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(there).free
    return NoSpaceError(
        f"no space is left to write {target}: it needs {bytes_in_words(needs)} or more, and"
        f" {bytes_in_words(free)} are free where quotas and limits allow it; what was written"
        " before is whole: make room, and give the same command again"
    )


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, says that there is no space left."""
    if error is None:
        return False
    number = error.errno if isinstance(error, OSError) else _NUMBER.search(str(error))
    code = int(number[1]) if isinstance(number, re.Match) else number
    return code in _FULL or is_full(error.__cause__ or error.__context__)


def partial_path(target: Path) -> Path:
    """Return where a file or folder lies until it is whole."""
    return target.with_name(f".{target.name}{PARTIAL}")
