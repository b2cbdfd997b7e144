"""lm-evaluation-harness's own tasks with their data, also from local files without a network."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from re import MULTILINE, findall
from typing import Any

import lm_eval.tasks
from datasets import Dataset
from lm_eval.tasks import TaskManager
from lm_eval.tasks.fda.task import FDA
from lm_eval.tasks.squad_completion.task import SQUADCompletion
from lm_eval.tasks.swde.task import SWDE

from fastweights.errors import DataError, reason_of
from fastweights.lab.evals.items import HARNESS_SOURCES
from fastweights.lab.evals.suites import TableColumn

SPLIT = "validation"
"""What the one split of a local file is called."""
_IN_PYTHON = {"swde": SWDE, "fda": FDA, "squad_completion": SQUADCompletion}
"""Tasks that are classes in lm-eval, with their data set in their code."""
_NAMES = r"^(?:task|group|tag):\s*[\"']?([^\s\"']+)[\"']?\s*$"


@dataclass(frozen=True)
class LoadedTask:
    """A task of lm-evaluation-harness with its data, and the columns that it scores.

    Attributes:
        columns: The columns.
        tasks: What `lm_eval.evaluate` takes: the task, or those of a group.
        sizes: Numbers of items of these.
    """

    columns: tuple[TableColumn, ...]
    tasks: Mapping[str, Any]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, columns: Sequence[TableColumn], tasks: Mapping[str, Any]) -> LoadedTask:
        sizes = tuple(len(task.eval_docs) for task in tasks["tasks"].values())
        return cls(tuple(columns), tasks, sizes)

    def items(self, limit: int | None) -> int:
        """The number of its items, of each of its tasks no more than `limit`."""
        return sum(size if limit is None else min(size, limit) for size in self.sizes)

    @cached_property
    def documents(self) -> str:
        """A hash of its items, and of those that solved examples are drawn from."""
        digest = sha256()
        for task in self.tasks["tasks"].values():
            for document in (*task.eval_docs, *(task.sampler.df or ())):
                digest.update(json.dumps(document, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


@contextmanager
def without_remarks() -> Iterator[None]:
    """Leave out what lm-eval remarks on its own settings."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_tasks(columns: Iterable[TableColumn], data: Path | None) -> list[LoadedTask]:
    """Load lm-evaluation-harness's own tasks with their data.

    Args:
        columns: What is to be scored.
        data: A folder of evaluation files (`HARNESS_SOURCES`), each of which takes the place of the
            data set that lm-eval would download.

    Raises:
        DataError: If data are missing; the message names all of them, and what to do.
        ValueError: If lm-eval has no task of a name.
    """
    groups: dict[str, list[TableColumn]] = {}
    for column in columns:
        groups.setdefault(f"{column.task} {column.changes}", []).append(column)
    manager = find_tasks({group[0].task for group in groups.values()})
    loaded, missing = list[LoadedTask](), dict[str, str]()
    for group in groups.values():
        try:
            with without_remarks():
                loaded.append(LoadedTask.of(group, _load(manager, group[0], data)))
        except ImportError as error:
            raise ValueError(
                f"lm-evaluation-harness cannot load its task {group[0].task}: {error}"
            ) from error
        except (OSError, RuntimeError) as error:
            missing[group[0].task] = reason_of(error).split("\n")[0]
    if missing:
        raise DataError(_what_is_missing(missing, [one.columns[0].task for one in loaded]))
    return loaded


def find_tasks(names: Iterable[str]) -> TaskManager:
    """Read the folders of lm-evaluation-harness that define these tasks, of which it has many.

    Raises:
        ValueError: If it has no task of a name.
    """
    wanted = set(names)
    folders = {folder for name in wanted for folder in _folders().get(name, ())}
    manager = TaskManager(include_path=sorted(folders), include_defaults=False)
    if unknown := wanted - set(manager.all_tasks):
        raise ValueError(
            f"lm-evaluation-harness has no task {', '.join(sorted(unknown))}; `lm_eval ls tasks`"
            " lists them"
        )
    return manager


@cache
def _folders() -> dict[str, set[Path]]:
    """The folders whose files speak of a task, a group or a tag, by its name."""
    found: dict[str, set[Path]] = {}
    root = Path(lm_eval.tasks.__file__).parent
    for path in root.glob("*/**/*.yaml"):
        for name in findall(_NAMES, path.read_text("utf-8"), MULTILINE):
            found.setdefault(name, set()).add(root / path.relative_to(root).parts[0])
    return found


def _load(manager: TaskManager, column: TableColumn, data: Path | None) -> Mapping[str, Any]:
    changes = {**column.changes, **_local_data(column.task, data)}
    if not changes:
        return manager.load([column.task])
    member: Any = {"task": column.task, **changes}
    found = manager.load([{"group": column.name, "task": [member]}])
    return {**found, "groups": {}, "group_map": {}}


def _local_data(task: str, data: Path | None) -> Mapping[str, Any]:
    """What makes lm-eval read a file in place of its data set; solved examples are other items."""
    files = HARNESS_SOURCES.get(task)
    if data is None or files is None or not files.are_in(data):
        return {}
    documents = Dataset.from_list([dict(document) for document in files.documents(data)])
    if task in _IN_PYTHON:
        fields = {"download": lambda self, *_, **__: setattr(self, "dataset", _split(documents))}
        return {"class": type(task, (_IN_PYTHON[task],), fields)}
    splits = {"training_split": None, "validation_split": None, "test_split": SPLIT}
    return {"custom_dataset": lambda **_: _split(documents), **splits, "fewshot_split": SPLIT}


def _split(documents: Dataset) -> dict[str, Dataset]:
    return {SPLIT: documents}


def _what_is_missing(missing: Mapping[str, str], there: Sequence[str]) -> str:
    readable = "; ".join(
        f"{task} from {' and '.join(HARNESS_SOURCES[task].files)}"
        for task in missing
        if task in HARNESS_SOURCES
    )
    return (
        f"no data for {', '.join(missing)} ({next(iter(missing.values()))}); with a network, and"
        " without HF_HUB_OFFLINE, lm-evaluation-harness downloads them"
        + (f"; files in --data do as well: {readable}" if readable else "")
        + (f"; to score the rest, give --tasks {' '.join(dict.fromkeys(there))}" if there else "")
    )
