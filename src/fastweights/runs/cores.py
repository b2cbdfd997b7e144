"""Training beside programs that keep cores busy.

OpenMP's threads spin while they wait for each other. Where another program has the core of one of
them, the others spend their own share of time so, and then wait for a core too: an update may take
twenty times as long. libgomp stops spinning while the threads that it has given to all callers
together are more than the processors, which can be brought about at any time.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""What says how threads wait: one of them is the user's own choice."""
CROWDED, QUIET = 0.25, 0.05
"""Seconds per second that threads queue for cores: from the one on cores are missing, up to the
other they are free."""
OFTEN, SELDOM = 1.0, 30.0
"""Least seconds from look to look, and while threads sleep."""
_PROCESS = Path("/proc/self")


class BusyCoreWarning(UserWarning):
    """Other programs keep cores busy that torch's threads wait for."""


def queued_seconds() -> float | None:
    """Seconds that the threads of this process could have run in but had no core, in all.

    None where the system does not say: Linux does.
    """
    try:
        threads = list((_PROCESS / "task").iterdir())
        return sum(int((t / "schedstat").read_text().split()[1]) for t in threads) / 1e9
    except (OSError, IndexError):
        return None


class CoreWatch:
    """Looks now and then whether torch's threads queue for cores, and has them sleep while they do.

    Args:
        queued: Seconds that threads have queued, in all; None if that is not known.
        clock: Seconds from any beginning.
    """

    def __init__(
        self,
        queued: Callable[[], float | None] = queued_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._queued, self._clock = queued, clock
        self._awake: threading.Event | None = None
        self._has_warned = False
        self._time, self._before = clock(), queued()

    @property
    def is_sleeping(self) -> bool:
        """Whether threads sleep while they wait for each other."""
        return self._awake is not None

    def look(self) -> None:
        """Have threads sleep if they have queued for cores since the last look, spin if not."""
        passed = self._clock() - self._time
        if passed < (SELDOM if self.is_sleeping else OFTEN):
            return
        queued, before = self._queued(), self._before
        self._time, self._before = self._clock(), queued
        if queued is None or before is None:
            return
        if self.is_sleeping:
            if queued - before < QUIET * passed:
                self.end()
        elif queued - before > CROWDED * passed:
            self._sleep()

    def end(self) -> None:
        """Let threads wait as they did."""
        if self._awake is not None:
            self._awake.set()
        self._awake = None

    def _sleep(self) -> None:
        if _uses_libgomp():
            self._awake = _let_threads_sleep()
        if not self._has_warned:
            warnings.warn_explicit(_explain(self.is_sleeping), BusyCoreWarning, "fastweights", 0)
        self._has_warned = True


@contextmanager
def watched_cores() -> Iterator[Callable[[], None]]:
    """The `look` of a `CoreWatch` for the length of a block; nothing where torch has one thread, or
    the user has said how threads wait.
    """
    if torch.get_num_threads() == 1 or any(name in os.environ for name in CHOSEN):
        yield lambda: None
        return
    watch = CoreWatch()
    try:
        yield watch.look
    finally:
        watch.end()


def _uses_libgomp() -> bool:
    """Whether torch's OpenMP library is GNU's."""
    return "libgomp" in (_PROCESS / "maps").read_text()


def _let_threads_sleep() -> threading.Event:
    """Have libgomp give threads to callers who do nothing with them, until the event is set.

    Each caller beside the first brings one thread fewer than a team has, as it is one itself.
    """
    processors, team = len(os.sched_getaffinity(0)), torch.get_num_threads()
    callers = max(0, processors - team) // (team - 1) + 1
    ready, awake = threading.Barrier(callers + 1), threading.Event()
    for _ in range(callers):
        threading.Thread(target=_keep_threads, args=(ready, awake), daemon=True).start()
    ready.wait()
    return awake


def _keep_threads(ready: threading.Barrier, awake: threading.Event) -> None:
    torch.zeros(torch.get_num_threads() << 16).add_(1)  # large enough for all threads
    ready.wait()
    awake.wait()


def _explain(sleeping: bool) -> str:
    threads = torch.get_num_threads()
    crowded = f"other programs keep cores busy that torch's {threads} threads want"
    if sleeping:
        return (
            f"{crowded}. They now sleep, while that lasts, where they spun to wait for each other;"
            " OMP_WAIT_POLICY=passive in front of the command has them do so from the beginning"
        )
    return (
        f"{crowded}, and they spin while they wait for each other: updates may take several times"
        " as long. OMP_WAIT_POLICY=passive in front of the command has them sleep,"
        " OMP_NUM_THREADS=1 leaves those cores alone"
    )
