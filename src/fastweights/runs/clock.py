"""The time that a run takes."""

from __future__ import annotations

import time

from fastweights.runs.checkpoint import Progress


class TrainingClock:
    """Measures the seconds of a run, across restarts, and its speed."""

    def __init__(self, progress: Progress) -> None:
        self._began = time.perf_counter() - progress.seconds
        self.restart(progress.step)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def restart(self, step: int) -> None:
        """Measure the speed from this step on."""
        self._since, self._step = self.seconds, step

    def steps_per_second(self, step: int) -> float:
        """Return the speed since the last `restart`."""
        return (step - self._step) / max(self.seconds - self._since, 1e-9)
