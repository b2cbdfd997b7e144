"""A watch over the processes that train together: one that is silent is named, and not waited for.

Each process leaves a sign of life in the group's store, by a thread of its own: which step it has
reached, and where in the program it is. A process that waits reads those of the others.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PATIENCE = 600.0
"""Seconds after which a process that waits for another one names it and ends, unless told."""
SILENT = 75
"""The exit status then: a failure that passes, after which the same command resumes."""
SPOKEN = "fastweights/spoken"
"""The note that says how many processes of the group have asked to say an error."""
_SIGNS = 10  # of life within the patience
_RARELY = 30.0  # most seconds between two of them
_PACKAGE = str(Path(__file__).parents[1])
_HOW_ON = "start all processes again to resume"


@dataclass(frozen=True)
class Sign:
    """What a process says of itself.

    Attributes:
        host, pid: Where it runs.
        count: Number of this sign.
        moves: How often its main thread has begun or ended an update, or a wait.
        step: The update that it makes, or made last.
        waits: Whether it waits for others.
        updates: Whether it makes an update that is not the first one, which may take longer.
        place: The function of this library that it is in.
    """

    host: str
    pid: int
    count: int = 0
    moves: int = 0
    step: int = 0
    waits: bool = False
    updates: bool = False
    place: str = ""


class Account:
    """What one process knows of another, or of itself, by its signs.

    Attributes:
        sign: The last sign; None if there was none yet.
        silent: Seconds since it came.
        still: Seconds since its main thread moved.
    """

    def __init__(self) -> None:
        self.sign: Sign | None = None
        self.silent = self.still = 0.0

    def hear(self, sign: Sign | None, passed: float) -> None:
        """Take note of the newest sign, `passed` seconds after the last one was read."""
        before, self.sign = self.sign, sign
        new = sign is not None and (before is None or sign.count != before.count)
        moved = sign is not None and (before is None or sign.moves != before.moves)
        self.silent = 0.0 if new else self.silent + passed
        self.still = 0.0 if moved else self.still + passed


def find_fault(me: int, accounts: Sequence[Account], patience: float) -> str | None:
    """Say for whom a process has waited too long, or None.

    Who reads a text, validates or saves may take as long as it takes, as long as there are signs
    of life.

    Args:
        me: Number of the process that waits.
        accounts: What it knows of all, in their order.
        patience: How long it waits, in seconds.
    """
    own = accounts[me]
    assert own.sign is not None
    stuck = own.still >= patience
    if not own.sign.waits and not (stuck and own.sign.updates):
        return None
    for number, other in enumerate(accounts):
        if number != me and other.silent >= patience:
            return _say_silent(number, other)
    for number, other in enumerate(accounts):
        if number != me and stuck and _is_behind(own.sign, other, patience):
            return _say_behind(number, other)
    return None


def _is_behind(own: Sign, other: Account, patience: float) -> bool:
    """Whether the other one's update keeps this process waiting."""
    sign = other.sign
    if sign is None or sign.waits or not sign.updates or other.still < patience:
        return False
    return own.waits or sign.step < own.step


def _say_silent(number: int, other: Account) -> str:
    if other.sign is None:
        return f"process {number} has been silent for {other.silent:.0f} s, from the beginning on"
    return (
        f"{_name(number, other.sign)} has been silent for {other.silent:.0f} s at step"
        f" {other.sign.step}{_place(other.sign)}"
    )


def _say_behind(number: int, other: Account) -> str:
    assert other.sign is not None
    return (
        f"{_name(number, other.sign)} has been in the update of step {other.sign.step} for"
        f" {other.still:.0f} s, and the others wait{_place(other.sign)}; if an update takes that"
        " long, give more --patience"
    )


def _name(number: int, sign: Sign) -> str:
    return f"process {number} ({sign.host}, pid {sign.pid})"


def _place(sign: Sign) -> str:
    return f"; it was last seen in {sign.place}" if sign.place else ""


class Watch:
    """The watch of one process: a thread speaks with the store, another one looks that it answers.

    Args:
        store: The group's store, of which this one takes a connection of its own.
        index: Number of this process.
        count: Number of processes.
        patience: Seconds that this process waits for another.
    """

    def __init__(self, store: Any, index: int, count: int, patience: float) -> None:
        self._store, self._index, self._count = store.clone(), index, count
        self._patience, self._pause = patience, min(patience / _SIGNS, _RARELY)
        self._main, self._launcher = threading.main_thread().ident, _launcher()
        self._own, self._answers = Sign(socket.gethostname(), os.getpid()), 0
        self._last_step: int | None = None
        self._say()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._speak, self._look)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Mark the update of a step, for the length of a block."""
        goes_on, self._last_step = self._last_step == step - 1, step
        self._own = replace(self._own, step=step)
        with self.mark(updates=goes_on):
            yield

    @contextmanager
    def mark(self, **marks: Any) -> Iterator[None]:
        """Mark what the main thread does in a block."""
        self._note(**marks)
        try:
            yield
        finally:
            self._note(**dict.fromkeys(marks, False))

    def end(self) -> None:
        """End both threads, unless the store does not answer."""
        self._over.set()
        for thread in self._threads:
            thread.join(min(self._pause, 1.0))

    def _note(self, **marks: bool) -> None:
        self._own = replace(self._own, moves=self._own.moves + 1, **marks)

    def _say(self) -> None:
        sign = replace(self._own, count=self._answers, place=self._find_place())
        self._store.set(_key(self._index), json.dumps(asdict(sign)))

    def _speak(self) -> None:
        accounts = self._no_accounts()
        for passed in self._pauses():
            try:
                self._say()
                signs = self._signs()
                self._answers += 1
                accounts = accounts if self._own.waits or self._own.updates else self._no_accounts()
                for account, sign in zip(accounts, signs, strict=True):
                    account.hear(sign, passed)
                if fault := find_fault(self._index, accounts, self._patience):
                    _leave(fault if self._store.add(SPOKEN, 1) == 1 else None)
            except RuntimeError:  # the store has ended, and with it the launcher or a process
                return

    def _look(self) -> None:
        """End this process if the store does not answer; save, if the launcher has ended."""
        answers = Account()
        for passed in self._pauses():
            answers.hear(replace(self._own, count=self._answers), passed)
            stuck = min(answers.silent, answers.still) >= self._patience
            if stuck and (self._own.waits or self._own.updates):
                _leave(
                    "the store of this run, which its launcher or process 0 keeps, has not"
                    f" answered for {answers.silent:.0f} s"
                )
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                _write("the launcher of this run has ended; this process saves, and ends too")
                os.kill(os.getpid(), signal.SIGTERM)

    def _pauses(self) -> Iterator[float]:
        """The seconds since the last pause, until the watch is over.

        A computer that slept, or a process that was stopped, counts as one pause.
        """
        last = time.monotonic()
        while not self._over.wait(self._pause):
            now = time.monotonic()
            yield min(now - last, 2 * self._pause)
            last = now

    def _no_accounts(self) -> list[Account]:
        return [Account() for _ in range(self._count)]

    def _signs(self) -> list[Sign | None]:
        keys = [_key(number) for number in range(self._count)]
        if self._store.check(keys):
            return [_read(sign) for sign in self._store.multi_get(keys)]
        return [_read(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def _find_place(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        if frame is None:
            return ""
        file = Path(frame.f_code.co_filename).relative_to(_PACKAGE)
        return f"{frame.f_code.co_qualname} ({file}, line {frame.f_lineno})"


_watch: Watch | None = None


@contextmanager
def expecting(patience: float) -> Iterator[None]:
    """Wait for all processes to meet, for the length of a block.

    Before the meeting nobody knows who is missing: a process that was killed on its way there has
    left nothing, and without a launcher nobody else would tell of it.

    Args:
        patience: Seconds that this process waits for the others to come.
    """
    late = (
        f"the processes of this run have not all met within {patience:.0f} s: one has ended on its"
        " way, or was never started"
    )
    timer = threading.Timer(patience, _leave, [late])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def begin(store: Any, index: int, count: int, patience: float) -> None:
    """Begin to watch over the group that this process has joined, unless that has begun.

    Args:
        store: The group's store.
        index: Number of this process.
        count: Number of processes.
        patience: Seconds that this process waits for another.
    """
    global _watch
    if _watch is None:
        _watch = Watch(store, index, count, patience)
        atexit.register(end)


def end() -> None:
    """End the watch of this process, if there is one."""
    global _watch
    if _watch is not None:
        _watch.end()
        atexit.unregister(end)
    _watch = None


def update(step: int) -> AbstractContextManager[None]:
    """Mark the update of a step, for the length of a block.

    It may take no longer than the patience of the others, unless it is the first after something
    else: that one may be compiled.

    Args:
        step: Number of the update, from 1.
    """
    return nullcontext() if _watch is None else _watch.update(step)


def waiting() -> AbstractContextManager[None]:
    """Mark that this process waits for others, for the length of a block."""
    return nullcontext() if _watch is None else _watch.mark(waits=True)


def _key(number: int) -> str:
    return f"fastweights/sign-{number}"


def _read(sign: bytes) -> Sign:
    return Sign(**json.loads(sign))


def _launcher() -> int | None:
    """The process of ``torchrun`` or ``accelerate launch`` that started this one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _leave(fault: str | None) -> None:
    """End this process, whose main thread may never come back."""
    if fault is not None:
        _write(f"{fault}; {_HOW_ON}")
    os._exit(SILENT)


def _write(message: str) -> None:
    os.write(2, f"fastweights: {message}\n".encode())
