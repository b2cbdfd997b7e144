"""A run's folder is one run's alone and one process's at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fastweights.runs.errors import CheckpointError
from fastweights.runs.files import PARTIAL, atomic_file


def is_run(out: Path, config: object) -> bool:
    """Whether `out` is this run's already. Raises CheckpointError if it is something else's."""
    record = out / "run.json"
    if not record.exists():
        if out.exists() and any(not path.name.endswith(PARTIAL) for path in out.iterdir()):
            raise CheckpointError(
                f"{out} exists and is not a training run; choose another folder, or remove it"
            )
        return False
    try:
        theirs = _flatten(json.loads(record.read_text()))
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{record} is damaged; choose another folder, or remove {out}"
        ) from error
    ours = _flatten(to_json_value(config))
    changed = [
        f"{key} was {theirs.get(key)}, is {ours.get(key)}"
        for key in theirs | ours
        if theirs.get(key) != ours.get(key)
    ]
    if changed:
        raise CheckpointError(
            f"{out} holds another run ({'; '.join(changed)}); choose another folder, or remove it"
        )
    return True


def create_run(out: Path, config: object) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with atomic_file(out / "run.json") as new:
        new.write_text(json.dumps(to_json_value(config), indent=1))


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Keeps other processes from training in `out`. Raises CheckpointError if one is there
    already.
    """
    lock = FileLock(out / "run.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(
            f"another process trains in {out}; wait for it, or choose another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def to_json_value(value: Any) -> Any:
    """A value as JSON has it, dataclasses with the names of their types."""
    if is_dataclass(value):
        content = {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **content}
    return json.loads(json.dumps(value))


def _flatten(value: Any, path: str = "") -> dict[str, object]:
    """Nested dictionaries as one, keys joined by dots."""
    if not isinstance(value, dict):
        return {path: value}
    inner = [_flatten(part, f"{path}.{key}" if path else key) for key, part in value.items()]
    return {key: part for flat in inner for key, part in flat.items()}
