"""The end of a run, which may change after it began: the number of updates, and the learning rates
until then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.errors import CheckpointError
from fastweights.training.loop.checkpoint import last_step
from fastweights.training.loop.files import remove_folder, write_json
from fastweights.training.loop.folder import RECORD, lock_run, read_record
from fastweights.training.loop.identity import differences, to_json_value, to_record
from fastweights.training.loop.schedules import Schedule, read_schedule
from fastweights.training.loop.stage import Optimization


@dataclass(frozen=True)
class _RunEnd:
    """When a run ends, and its learning rates until then."""

    steps: int
    schedule: Schedule

    def rate(self, step: int) -> float:
        return self.schedule.rate(1.0, step, self.steps)


def change_end(out: Path, config: Optimization, results: Iterable[str]) -> None:
    """Let the run in a folder end as `config` says, if it is that run but for its end: `steps` and
    `schedule`.

    It becomes the run that it would have been with this end from the beginning, which needs that
    all updates made so far had the learning rates that they have now.

    Args:
        out: The folder; nothing happens if it holds no run, another one, or this very one.
        config: The run as it is to be.
        results: Folders in `out` that the former end has left. They are removed first: the last
            checkpoint has the same weights, and the new end writes them again.

    Raises:
        CheckpointError: If an update made so far had another learning rate, or more are made
            already.
    """
    end = _RunEnd(config.steps, config.schedule)
    former = _former_end(read_record(out), config)
    if former is None or former == end:
        return
    with lock_run(out):
        made = last_step(out / "checkpoints")
        _require_same_rates(out, made, former, end)
        if made > config.steps:
            raise CheckpointError(
                f"{out} has made {made} steps, and {config.steps} are fewer; ask for {made} or"
                " more, or choose another folder"
            )
        for result in results:
            remove_folder(out / result)
        write_json(out / RECORD, to_record(config))


def _former_end(stored: Any, config: Optimization) -> _RunEnd | None:
    """The stored end, if nothing else differs."""
    if not isinstance(stored, dict) or not isinstance(steps := stored.get("steps"), int):
        return None
    schedule = read_schedule(stored.get("schedule"))
    ended = {**stored, "steps": config.steps, "schedule": to_json_value(config.schedule)}
    if schedule is None or any(differences(ended, config)):
        return None
    return _RunEnd(steps, schedule)


def _require_same_rates(out: Path, made: int, former: _RunEnd, end: _RunEnd) -> None:
    for step in range(min(made, former.steps, end.steps)):
        if former.rate(step) != end.rate(step):
            raise CheckpointError(
                f"{out} is a run of {former.steps} steps, which cannot become {end.steps}: step"
                f" {step + 1} of the {made} that it has made would have had another learning rate"
                f" ({_named(former, end)}); go on from its model in a new folder (fastweights train"
                f" --from {out} --steps {end.steps} --out FOLDER), and begin with --schedule wsd"
                " what may become longer until its decay, or with --schedule constant"
            )


def _named(former: _RunEnd, end: _RunEnd) -> str:
    names = dict.fromkeys(type(one.schedule).__name__ for one in (former, end))
    return f"{' and '.join(names)} schedule"
