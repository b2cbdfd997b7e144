"""The real command in processes of its own, to which faults happen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "FASTWEIGHTS_TEST_MARK"
"""The variable by which processes of a command are known, whoever started them."""
LONGEST = 120.0
"""Seconds that a test waits for anything."""


def command(
    arguments: Sequence[str], processes: int = 1, module: str = "fastweights.cli", restarts: int = 0
) -> list:
    """The words of the command, by ``torchrun`` for several processes."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        start += [f"--max-restarts={restarts}"]
    return [*start, "-m", module, *arguments]


class Running:
    """A command that runs, with what it says in files; it can be hit, and must end as a whole.

    Args:
        words: The command and its arguments.
        folder: Where what it says is kept.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._said = {name: folder / f"{self.mark}.{name}" for name in ("out", "error")}
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path[1:])
        with self._said["out"].open("w") as out, self._said["error"].open("w") as error:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=error, env=environment, start_new_session=True
            )

    @property
    def out(self) -> str:
        return self._said["out"].read_text()

    @property
    def errors(self) -> list[str]:
        """What the command itself says of errors, a line each."""
        return [
            line.removeprefix("fastweights: ")
            for line in self._said["error"].read_text().splitlines()
            if line.startswith("fastweights: ")
        ]

    def all(self) -> dict[int, str]:
        """The processes that there are now, with their rank or nothing."""
        return {pid: rank for pid in _processes() if (rank := _rank(pid, self.mark)) is not None}

    def worker(self, rank: int) -> int:
        """The process of this rank, once it is there."""
        wait_for(lambda: str(rank) in self.all().values())
        return next(pid for pid, of in self.all().items() if of == str(rank))

    def kill(self, *pids: int, number: int = signal.SIGKILL) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, longest: float = LONGEST) -> int:
        """Wait for the end of all; the status of the first one. None may be left behind."""
        try:
            status = self.process.wait(longest)
            wait_for(lambda: not self.all(), longest)
        finally:
            self.kill(*self.all())
        return status


def wait_for(fact: Callable[[], object], longest: float = LONGEST) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: If it never is.
    """
    end = time.monotonic() + longest
    while not fact():
        if time.monotonic() > end:
            raise TimeoutError(f"still not so after {longest:.0f} s")
        time.sleep(0.02)


def rows_of(out: Path) -> int:
    """How many rows of metrics there are."""
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _processes() -> list[int]:
    return [int(name.name) for name in Path("/proc").iterdir() if name.name.isdecimal()]


def _rank(pid: int, mark: str) -> str | None:
    """The rank of a process with this mark that is no zombie; None for others."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    held = dict(word.split(b"=", 1) for word in words if b"=" in word)
    return held.get(b"RANK", b"").decode() if held.get(MARK.encode()) == mark.encode() else None
