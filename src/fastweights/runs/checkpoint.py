"""Checkpoints: folders that are written atomically, and checked by hash when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from fastweights.runs.errors import CheckpointError
from fastweights.runs.files import atomic_folder, remove_folder, remove_partials

CHECKPOINTS_TO_KEEP = 2


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Updates made.
        seconds: Seconds spent on them.
    """

    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read: a folder with a stage's files, optimizer.safetensors and
    training.json.

    training.json holds the progress and the hashes of all files.

    Attributes:
        folder: The checkpoint's folder.
        progress: How far the run had come.
    """

    folder: Path
    progress: Progress

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.folder / "optimizer.safetensors")


class Checkpoints:
    """The checkpoints of a run, ``step-00000100`` and so on, of which the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        remove_partials(folder)

    def write(self, progress: Progress, fill: Callable[[Path], None]) -> None:
        """Write a new checkpoint and remove all but the last two.

        Args:
            progress: How far the run has come.
            fill: Called with a new folder, into which it writes the stage's files.
        """
        target = self._at(progress.step)
        with atomic_folder(target) as folder:
            fill(folder)
            files = {path.name: hash_file(path) for path in sorted(folder.iterdir())}
            (folder / "training.json").write_text(
                json.dumps({**asdict(progress), "files": files}, indent=1)
            )
        for old in self._all()[:-CHECKPOINTS_TO_KEEP]:
            remove_folder(old)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there are none.

        Newer ones that are damaged are renamed, with a warning.

        Raises:
            CheckpointError: If all checkpoints are damaged.
        """
        damage: list[str] = []
        for folder in reversed(self._all()):
            try:
                checkpoint = open_checkpoint(folder)
            except CheckpointError as error:
                damage.append(str(error))
            else:
                for error in damage:
                    warn(f"{error}; going back to {folder.name}")
                self._set_aside_after(folder)
                return checkpoint
        if damage:
            raise CheckpointError(
                f"no undamaged checkpoint is left: {'; '.join(damage)}; remove {self._folder} to"
                " start again"
            )
        return None

    def _set_aside_after(self, folder: Path) -> None:
        for later in self._all():
            if later.name > folder.name:
                aside = later.with_name(f"{later.name}.damaged")
                remove_folder(aside)
                later.rename(aside)

    def _at(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _all(self) -> list[Path]:
        return _checkpoints_in(self._folder)


def last_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder, damaged or not; 0 if there is none."""
    return max((int(found.name[5:]) for found in _checkpoints_in(folder)), default=0)


def _checkpoints_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-????????"))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in `folder` and compare every file with its hash.

    Raises:
        CheckpointError: If a file is missing, changed or cut short; the message names it.
    """
    record = folder / "training.json"
    try:
        content = json.loads(record.read_text())
        progress, files = Progress(content["step"], content["seconds"]), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{record} is missing or damaged: {folder} is not a checkpoint"
        ) from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or hash_file(path) != expected:
            raise CheckpointError(f"{path} is missing, changed or cut short")
    return Checkpoint(folder, progress)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer as a plain Hugging Face folder."""
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars for the length of a block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def model_folder(path: Path) -> Path:
    """Return the model folder that `path` means: itself, or the one of a run, finished or not.

    Raises:
        CheckpointError: If there is no model.
    """
    candidates = [
        path,
        path / "model",
        *sorted((path / "checkpoints").glob("step-????????"), reverse=True),
    ]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder} has adapters without their model, which the end of their run writes to"
                " model/; finish the run, or name the model that they belong to"
            )
    raise CheckpointError(
        f"no model at {path}: it has no config.json, and neither does a run's folder in it"
    )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
