"""One step of a conversion's run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from fastweights.errors import CheckpointError
from fastweights.linearize.distill.student import StudentModel
from fastweights.training.loop.files import read_json


class ConversionStep(ABC):
    """One step of a run, which can be stopped or killed at any moment and repeated.

    It resumes where it was, and reads finished results from the run's folder.

    Attributes:
        name: Name of the step.
        result: The file or folder, in the run's folder, that exists once it is done.
        numbers: What the result holds, if it is a JSON file.
    """

    name: str
    result: str
    numbers: tuple[str, ...] = ()

    def check(self, out: Path) -> None:
        """Check the result in the run's folder `out`, if it is a JSON file and there.

        Raises:
            CheckpointError: If it is damaged.
        """
        path = out / self.result
        if not self.numbers or not path.exists():
            return
        found = read_json(path)
        there = found if isinstance(found, dict) else {}
        for name in self.numbers:
            if name not in there:
                raise CheckpointError(
                    f"{path} is damaged (it has no {name!r}); remove it, and the same command"
                    " writes it again"
                )

    def is_done(self, out: Path) -> bool:
        """Whether its result is in the run's folder `out`."""
        return (out / self.result).exists()

    @abstractmethod
    def run(self, student: StudentModel) -> StudentModel | None:
        """Write what is not written yet.

        Returns:
            The model as the next step needs it; None if this one was stopped before its end.
        """

    def run_together(self, student: StudentModel) -> StudentModel | None:
        """Run in all processes: the first one writes the results, which the others then read."""
        with student.run.processes.first_then_others():
            return self.run(student)
