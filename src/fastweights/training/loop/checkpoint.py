"""Checkpoints: folders that are written atomically, and checked by hash when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from fastweights.errors import CheckpointError
from fastweights.importers.gguf import dequantize, is_gguf
from fastweights.training.loop.files import (
    atomic_folder,
    find_damage,
    hash_files,
    partial_path,
    remove_folder,
    remove_partials,
    size_of,
)
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.parts import PARTS

CHECKPOINTS_TO_KEEP = 2


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Updates made.
        seconds: Seconds spent on them.
        unvalidated: The row of this step, whose validation was stopped; None if it is in the curve.
    """

    step: int = 0
    seconds: float = 0.0
    unvalidated: Row | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read: a folder with a stage's files, optimizer.safetensors and
    training.json, or with the parts of all tensors in place of the first two.

    training.json holds the progress and the hashes of all files.

    Attributes:
        folder: The checkpoint's folder.
        progress: How far the run had come.
    """

    folder: Path
    progress: Progress

    @property
    def parts(self) -> Path | None:
        """The folder of the parts, if the processes that wrote it divided the model."""
        found = self.folder / PARTS
        return found if found.is_dir() else None

    @property
    def metrics(self) -> Path:
        """The copy of the run's curve."""
        return self.folder / "metrics.jsonl"


class Checkpoints:
    """The checkpoints of a run, ``step-00000100`` and so on, of which the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        remove_partials(folder)

    @contextmanager
    def new(self, progress: Progress) -> Iterator[Path]:
        """Yield the folder of a new checkpoint to fill, and remove all but the last two then.

        Args:
            progress: How far the run has come.
        """
        needs = max(map(size_of, _checkpoints_in(self._folder)[-1:]), default=0)
        with atomic_folder(self._at(progress.step), needs) as folder:
            yield folder
            (folder / "training.json").write_text(
                json.dumps({**asdict(progress), "files": hash_files(folder, [folder])}, indent=1)
            )
        for old in _checkpoints_in(self._folder)[:-CHECKPOINTS_TO_KEEP]:
            remove_folder(old)

    def unfinished(self, step: int) -> Path:
        """Return where the new checkpoint of a step is filled."""
        return partial_path(self._at(step))

    def latest(self, warn: Callable[[str], None], compare: bool = True) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there are none.

        Newer ones that are damaged are renamed, with a warning.

        Args:
            warn: Called with the warning.
            compare: Whether to compare files with their hashes; not needed right after another
                process has.

        Raises:
            CheckpointError: If all checkpoints are damaged.
        """
        damage: list[str] = []
        for folder in reversed(_checkpoints_in(self._folder)):
            try:
                checkpoint = open_checkpoint(folder, compare)
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
        for later in _checkpoints_in(self._folder):
            if later.name > folder.name:
                aside = later.with_name(f"{later.name}.damaged")
                remove_folder(aside)
                later.rename(aside)

    def _at(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def last_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder, damaged or not; 0 if there is none."""
    return max((int(found.name[5:]) for found in _checkpoints_in(folder)), default=0)


def _checkpoints_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-????????"))


def open_checkpoint(folder: Path, compare: bool = True) -> Checkpoint:
    """Read the checkpoint in `folder`.

    Args:
        folder: The folder.
        compare: Whether to compare every file with its hash.

    Raises:
        CheckpointError: If a file is missing, changed or cut short; the message names it.
    """
    record = folder / "training.json"
    try:
        content = json.loads(record.read_text())
        files = dict(content["files"])
        progress = Progress(content["step"], content["seconds"], content["unvalidated"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{record} is missing or damaged: {folder} is not a checkpoint"
        ) from error
    paths = {folder / name: digest for name, digest in files.items()}
    damaged = find_damage(paths) if compare else {p for p in paths if not p.is_file()}
    if damaged:
        raise CheckpointError(f"{min(damaged)} is missing, changed or cut short")
    return Checkpoint(folder, progress)


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer as a plain Hugging Face folder.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        folder: The folder.
        tensors: The model's tensors, whole; None if they are in its own memory.
    """
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors))
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


@contextmanager
def no_warnings_of_transformers() -> Iterator[None]:
    """Keep transformers from logging anything but errors for the length of a block."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def model_source(source: str | Path) -> str:
    """Return what transformers reads a model by that is named to us: a folder, or a name on the
    Hugging Face hub.

    Args:
        source: A folder of a run, a checkpoint or a model, a GGUF file, or a name on the hub.

    Raises:
        CheckpointError: If there is no model in the folder, or none in the file that can be read;
            or if there is no such folder, and no name on the hub is like that.
        ValueError: If there is no such GGUF file, or nothing to read it with.
    """
    path = Path(source)
    if is_gguf(path) or path.exists():
        return str(model_folder(path))
    if path.is_absolute() or len(path.parts) > 2 or ".." in path.parts:
        raise CheckpointError(f"no model at {str(source)!r}: there is no such folder or file")
    return str(source)


def model_folder(path: Path) -> Path:
    """Return the model folder that `path` means: itself, the one of a run, finished or not, or that
    of a GGUF file.

    Raises:
        CheckpointError: If there is no model.
    """
    if is_gguf(path):
        return dequantize(path)
    candidates = [
        path,
        path / "model",
        *sorted((path / "checkpoints").glob("step-????????"), reverse=True),
    ]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
        if (folder / PARTS).is_dir():
            raise CheckpointError(
                f"{folder} has the parts of a model that several processes divided, which the end"
                " of their run writes to model/; finish the run, which one process can do as well"
            )
        if (folder / "adapter_config.json").is_file():
            whole = (folder.parent / "model" / "config.json").is_file()
            raise CheckpointError(
                f"{folder} has adapters without their model, which the end of their run writes to"
                + (
                    f" {folder.parent}/model; name that"
                    if whole
                    else " model/; finish the run, or name the model that they belong to"
                )
            )
    raise CheckpointError(
        f"no model at {path}: it has no config.json, and neither does a run's folder in it"
    )
