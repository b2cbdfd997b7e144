"""The results of a finished run: written once, and compared with their hashes whenever the run is
asked for again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastweights.errors import CheckpointError
from fastweights.training.loop.checkpoint import hash_file
from fastweights.training.loop.files import read_json, remove_folder, write_json

SEAL = "results.json"
"""The record of SHA-256 by path, in a run's folder."""


def seal(out: Path, results: Iterable[Path]) -> None:
    """Record the hashes of these files, or of those in these folders, as far as they are there.

    Args:
        out: The run's folder.
        results: Files and folders in it.
    """
    files = [path for result in results for path in _files_of(result)]
    hashes = {str(path.relative_to(out)): hash_file(path) for path in files}
    if _read(out) != hashes:
        write_json(out / SEAL, hashes)


def remove_damaged(out: Path, results: Iterable[Path]) -> list[Path]:
    """Remove those of these files and folders that are not as they were recorded.

    Where the record is missing or damaged, they stay as they are.

    Returns:
        The files that were missing or changed.
    """
    hashes = _read(out) or {}
    damaged = [out / name for name, digest in hashes.items() if _is_damaged(out / name, digest)]
    for result in results:
        if any(path.is_relative_to(result) for path in damaged):
            result.unlink() if result.is_file() else remove_folder(result)
    return damaged


def _files_of(result: Path) -> list[Path]:
    found = [result] if result.is_file() else sorted(result.rglob("*"))
    return [path for path in found if path.is_file()]


def _is_damaged(path: Path, digest: str) -> bool:
    return not path.is_file() or hash_file(path) != digest


def _read(out: Path) -> dict[str, str] | None:
    """The record, or None if there is none, or none that can be read."""
    try:
        found = read_json(out / SEAL)
    except (FileNotFoundError, CheckpointError):
        return None
    return found if isinstance(found, dict) else None
