"""Exclusive ownership of a run folder: it belongs to one run, and to one process at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fastweights.errors import CheckpointError
from fastweights.training.loop.files import PARTIAL, read_json, remove_folder, write_json
from fastweights.training.loop.identity import differences, key_of, to_record
from fastweights.training.loop.json_lines import append_row, cut_torn_line, read_rows

RECORD = "run.json"
"""The record of what decides the run of a folder."""


def is_run(out: Path, config: object) -> bool:
    """Whether `out` holds the run that `config` describes.

    Raises:
        CheckpointError: If it holds something else.
    """
    records = list(_records(out))
    if not records:
        if out.exists() and any(not path.name.endswith(PARTIAL) for path in out.iterdir()):
            raise CheckpointError(
                f"{out} exists and is not a training run; choose another folder, or remove it"
            )
        return False
    if all(any(differences(record, config)) for record in records):
        _require_same(out, records[0], config)
    return True


def create_run(out: Path, config: object) -> None:
    """Make `out` the folder of the run that `config` describes, or put its record right.

    Raises:
        CheckpointError: If nothing can be written there.
    """
    with suppress(OSError, CheckpointError):
        if not any(differences(read_json(out / RECORD), config)):
            return
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / RECORD, to_record(config))
    except OSError as error:
        raise _not_writable(out, error) from error


def read_record(out: Path) -> Any | None:
    """Read the record of the run in `out`, or the copy of it in its newest checkpoint.

    Returns:
        The record; None if there is none.

    Raises:
        CheckpointError: If it is damaged, and there is no copy.
    """
    return next(_records(out), None)


def _records(out: Path) -> Iterator[Any]:
    """The record of a run, and the copies of it that its checkpoints have, as far as they can be
    read."""
    copies = sorted(out.glob(f"checkpoints/step-????????/{RECORD}"), reverse=True)
    damage: CheckpointError | None = None
    found = False
    for path in (out / RECORD, *copies):
        try:
            yield read_json(path)
            found = True
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            damage = damage or error
    if damage is not None and not found:
        raise CheckpointError(
            f"{damage.args[0].partition(';')[0]}, and no checkpoint has a copy of it; remove {out}"
            " to begin again, or choose another folder"
        ) from damage


def missing_folders(out: Path) -> list[Path]:
    """List `out` and the folders above it that are not there, the innermost first."""
    return [folder for folder in (out, *out.parents) if not folder.exists()]


@contextmanager
def remove_if_refused(made: Sequence[Path]) -> Iterator[None]:
    """Remove the folders that a run has made, the innermost first, if a block refuses its input.

    The first goes with all that is in it, those above it only where they are empty.
    """
    try:
        yield
    except (ValueError, OSError):
        for folder in made[:1]:
            remove_folder(folder)
        with suppress(OSError):
            for folder in made[1:]:
                folder.rmdir()
        raise


def keyed_folder(parent: Path, value: object) -> Path:
    """Return the folder in `parent` for what `value` decides; it need not exist yet.

    Its name is `key_of` the value. A file of JSON lines beside `parent` has the record of every
    name.

    Args:
        parent: The folder of all such folders.
        value: What decides the contents.

    Raises:
        CheckpointError: If the name belongs to another value.
    """
    folder, names = parent / key_of(value), parent.with_suffix(".jsonl")
    records = [row["record"] for row in read_rows(names) if row["name"] == folder.name]
    for record in records:
        _require_same(folder, record, value)
    if not records:
        parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(names)
        append_row(names, {"name": folder.name, "record": to_record(value)})
    return folder


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Keep other processes from training in `out` for the length of a block.

    Raises:
        CheckpointError: If another process trains there already, or nothing can be written there.
    """
    lock = FileLock(out / "run.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(
            f"another process trains in {out}; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise _not_writable(out, error) from error
    try:
        yield
    finally:
        lock.release()


def _not_writable(out: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write to {out} ({error.strerror}); make it writable, or choose another folder"
    )


def _require_same(out: Path, record: Any, value: object) -> None:
    """Raises CheckpointError unless the record says that `out` is of `value`."""
    if changed := "; ".join(differences(record, value)):
        raise CheckpointError(
            f"{out} holds another run ({changed}); choose another folder, or remove it"
        )
