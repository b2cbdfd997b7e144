"""The command in two processes that can be killed, without the seconds that imports take."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from killable_runs import FORKS, become_rank, free_port
from running import LONGEST

SHARD = 2048
"""Tokens of a shard of text."""


class Pair:
    """Two processes of one command, as a launcher starts them.

    Args:
        words: The arguments of the command.
        folder: Where what they say is kept.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self._said = [folder / f"error-{port}-{rank}" for rank in range(2)]
        self.ranks = [self._start(rank, port, list(words)) for rank in range(2)]

    def _start(self, rank: int, port: int, words: list[str]) -> BaseProcess:
        process = FORKS.Process(target=_run, args=(rank, port, words, self._said[rank]))
        process.start()
        return process

    @property
    def errors(self) -> list[str]:
        """What both have said of errors, a line each."""
        said = "".join(path.read_text() for path in self._said if path.exists())
        mark = "fastweights: "
        return [line.removeprefix(mark) for line in said.splitlines() if line.startswith(mark)]

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            pid = self.ranks[rank].pid
            if pid is not None and self.ranks[rank].is_alive():
                os.kill(pid, number)

    def end(self, longest: float = LONGEST) -> list[int | None]:
        """The statuses of both, which must come to an end."""
        last = time.monotonic() + longest
        for process in self.ranks:
            process.join(max(last - time.monotonic(), 0))
        statuses = [process.exitcode for process in self.ranks]
        self.send(signal.SIGKILL, 0, 1)
        assert None not in statuses, f"left behind after {longest:.0f} s: {statuses}"
        return statuses


def _run(rank: int, port: int, words: list[str], said: Path) -> None:
    become_rank(rank, 2, port)
    error = said.open("w")
    os.dup2(error.fileno(), 2)
    sys.stderr, sys.stdout = error, open(os.devnull, "w")  # noqa: SIM115
    from fastweights.cli.__main__ import run
    from fastweights.training.data.shards import write_shards

    write_shards.__defaults__ = (0, SHARD)
    run(words)
