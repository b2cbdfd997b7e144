"""The number of a run's updates, which may change after it began."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastweights.runs.checkpoint import last_step
from fastweights.runs.errors import CheckpointError
from fastweights.runs.files import read_json, remove_folder, write_json
from fastweights.runs.folder import RECORD, lock_run
from fastweights.runs.identity import differences, to_record
from fastweights.runs.stage import Optimization


def change_steps(out: Path, config: Optimization, results: Iterable[str]) -> None:
    """Let the run in a folder end after `config.steps`, if it is that run but for this number.

    Args:
        out: The folder; nothing happens if it holds no run, another one, or this very one.
        config: The run as it is to be.
        results: Folders in `out` that the former end has left. They are removed first: the last
            checkpoint has the same weights, and the new end writes them again.

    Raises:
        CheckpointError: If the learning rates depend on the number, or more steps are made already.
    """
    record = out / RECORD
    former = _former_steps(read_json(record), config) if record.exists() else None
    if former is None:
        return
    _require_open_end(out, config, former)
    with lock_run(out):
        _require_not_made(out, config.steps)
        for result in results:
            remove_folder(out / result)
        write_json(record, to_record(config))


def _former_steps(stored: Any, config: Optimization) -> int | None:
    """The stored number of steps, if that alone is another one."""
    steps = stored.get("steps") if isinstance(stored, dict) else None
    if steps is None or steps == config.steps:
        return None
    return None if any(differences({**stored, "steps": config.steps}, config)) else steps


def _require_open_end(out: Path, config: Optimization, former: int) -> None:
    if not config.schedule.is_open_ended:
        raise CheckpointError(
            f"{out} is a run of {former} steps, which cannot become {config.steps}: its learning"
            f" rates depend on their number ({type(config.schedule).__name__} schedule); go on"
            f" from its model in a new folder (fastweights train --from {out} --steps"
            f" {config.steps} --out FOLDER), and begin with --schedule constant what may become"
            " longer"
        )


def _require_not_made(out: Path, steps: int) -> None:
    made = last_step(out / "checkpoints")
    if made > steps:
        raise CheckpointError(
            f"{out} has made {made} steps, and {steps} are fewer; ask for {made} or more, or"
            " choose another folder"
        )
