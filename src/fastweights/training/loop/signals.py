"""Stopping at the end of a step on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 2.0
"""Seconds within which another signal says the same: launchers pass on what a terminal or a
scheduler has sent to all processes already."""


class StopOnSignal:
    """Context manager that catches SIGINT and SIGTERM; calling it returns whether one has arrived.

    A second signal, more than `SAME` seconds later, acts as it usually does.

    Args:
        told: Called at the first signal.
    """

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self._told, self._when = told, 0.0
        self._signal: int | None = None

    def __call__(self) -> bool:
        return self._signal is not None

    @property
    def exit_status(self) -> int:
        """The exit status of a run that was stopped, by SIGTERM if only another process knows: 130
        or 143, as of a program that the signal ended.
        """
        return 128 + (self._signal or signal.SIGTERM)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._when = number, time.monotonic()
            self._told()
        elif time.monotonic() - self._when > SAME:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
