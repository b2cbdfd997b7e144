"""The results of a finished run: written once, and compared with their hashes whenever the run is
asked for again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastweights.errors import CheckpointError
from fastweights.training.loop.files import (
    find_damage,
    hash_files,
    read_json,
    remove_folder,
    write_json,
)

SEAL = "results.json"
"""The record of SHA-256 by path, in a run's folder."""


def seal(out: Path, results: Iterable[Path]) -> None:
    """Record the hashes of these files, or of those in these folders, as far as they are there.

    Args:
        out: The run's folder.
        results: Files and folders in it.
    """
    hashes = hash_files(out, results)
    if _read(out) != hashes:
        write_json(out / SEAL, hashes)


def remove_damaged(out: Path, results: Iterable[Path]) -> list[Path]:
    """Remove those of these files and folders that are not as they were recorded.

    Where the record is missing or damaged, they stay as they are.

    Returns:
        The files that were missing or changed.
    """
    hashes = _read(out) or {}
    damaged = sorted(find_damage({out / name: digest for name, digest in hashes.items()}))
    for result in results:
        if any(path.is_relative_to(result) for path in damaged):
            result.unlink() if result.is_file() else remove_folder(result)
    return damaged


def _read(out: Path) -> dict[str, str] | None:
    """The record, or None if there is none, or none that can be read."""
    try:
        found = read_json(out / SEAL)
    except (FileNotFoundError, CheckpointError):
        return None
    return found if isinstance(found, dict) else None
