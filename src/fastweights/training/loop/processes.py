"""The processes that train one model together: one, or those of ``torchrun`` or ``accelerate
launch``."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from datetime import timedelta
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.rendezvous import rendezvous

from fastweights.errors import LostProcessError, OtherProcessError, Stopped, TrainingError
from fastweights.training.loop.report import Reporter, follow

T = TypeVar("T")
PATIENCE = 1800.0
"""Seconds after which an exchange with another process fails, unless told: torch's own time-out."""
SPOKEN = "fastweights/spoken"
"""The note that says how many processes of the group have asked to say an error."""
FAREWELL = 5.0
"""Seconds that the process with the store stays for those that still want to ask it."""
BETWEEN_LOOKS = 0.02
"""Seconds between two looks at how far another process is."""
BUCKET = 1 << 23
"""Numbers of gradients that are averaged at once, or more where the last one is larger."""
LOOKS, BETWEEN_QUESTIONS = 16, 0.5
"""Parts of a validation by several processes, and seconds of one by a single process, from one look
at whether to stop to the next."""
DONE, FAILED = "done", "failed"
_GLOO = "gloo", "pair closure"  # what its errors say, which have no type of their own
_TURNS = itertools.count()


class Processes:
    """The group of processes that train one model together, as one of them sees it.

    What they exchange is, of a single one, its own.

    Attributes:
        device: Where this process computes.
        index: Number of this process, from 0.
        count: Number of processes.
        together: How many processes, one after another, read slices of the same sequences.
    """

    device: torch.device
    index: int
    count: int
    together: int = 1
    _watch: Callable[[range], Iterable[int]] | None = None

    def read_together(self, together: int) -> None:
        """Have every `together` processes, one after another, read slices of the same sequences.

        Raises:
            TrainingError: If that does not divide the number of processes.
        """
        if self.count % together:
            raise TrainingError(
                f"{self.count} processes cannot read in groups of {together}; start a multiple of"
                f" {together} processes, or take slices = 1"
            )
        self.together = together

    @property
    def readers(self) -> int:
        """Number of groups that read sequences of their own."""
        return self.count // self.together

    @property
    def reader(self) -> int:
        """Number of this process's group, from 0."""
        return self.index // self.together

    def watched(self, stop: Callable[[], bool], reporter: Reporter) -> Self:
        """Return this group with a `share` that tells the first process's reporter of every part,
        and raises Stopped, in all processes together, where `stop()` is True in one of them; now
        and then it looks."""
        group, told = copy(self), reporter if self.is_first else Reporter()
        parts, looked = itertools.count(1), time.monotonic()

        def stops() -> bool:
            nonlocal looked
            if self.count > 1:
                return next(parts) % LOOKS == 0 and self.any(stop())
            due = time.monotonic() - looked >= BETWEEN_QUESTIONS
            looked = time.monotonic() if due else looked
            return due and stop()

        group._watch = lambda turns: follow(turns, "validating", told, stops)
        return group

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.index == 0

    def share(self, parts: Collection[T]) -> Iterator[tuple[T, bool]]:
        """Yield this group's share of `parts`, one of every `readers`, and whether it counts.

        All processes get equally many, as those that divide a model have to compute together: in
        the last round some get a part of another, which does not count.
        """
        left, turns = iter(parts), range(-(-len(parts) // self.readers))
        for _ in turns if self._watch is None else self._watch(turns):
            found = list(itertools.islice(left, self.readers))
            counts = self.reader < len(found)
            yield found[self.reader if counts else 0], counts

    def total(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sum numbers over all processes; a number that one of them lacks counts as 0 there."""
        return dict(numbers)

    def require_alike(self, *settings: object) -> None:
        """Check that all processes were started with the same settings.

        Raises:
            TrainingError: If they were not.
        """
        if len(found := self.total({repr(settings): 1.0})) > 1:
            raise TrainingError(
                f"the processes of this run were started with different settings:"
                f" {' and '.join(sorted(found))}; give all of them the same options"
            )

    def any(self, wish: bool) -> bool:
        """Whether `wish` is True in any process."""
        return wish

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average all gradients over the processes; a parameter without one in any process keeps
        none."""

    def begin_alike(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the first process's parameters to all processes."""

    def first_then_others(self) -> AbstractContextManager[None]:
        """Let the first process run a block before all others do."""
        return nullcontext()

    def hand_out(self, value: T) -> T:
        """Return the first process's value, which the others wait for however long."""
        return value

    def wait(self) -> None:
        """Wait until all processes have arrived here."""

    @cached_property
    def background(self) -> Any:
        """The group in which they meet while training goes on; first asked for by all at once."""
        return distributed.new_group(backend="gloo")


class Alone(Processes):
    """The group of a single process."""

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:
        self.device, self.index, self.count = device, 0, 1  # pyrefly: ignore[read-only]


class Launched(Processes):
    """The group of processes that a launcher started, by Accelerate.

    Gradients are averaged once per update, after its backward pass, so that a stage may go backward
    in any way, and a parameter that only some processes have used is no special case.

    Attributes:
        state: Accelerate's PartialState.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.device, self.index, self.count = (  # pyrefly: ignore[read-only]
            state.device,
            state.process_index,
            state.num_processes,
        )

    def total(self, numbers: Mapping[str, float]) -> dict[str, float]:
        from accelerate.utils import gather_object

        found = dict[str, float]()
        for part in gather_object([dict(numbers)]):
            for name, number in part.items():
                found[name] = found.get(name, 0.0) + number
        return found

    def any(self, wish: bool) -> bool:
        return bool(self._reduce(torch.tensor(float(wish)), "sum"))

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        if not parameters:
            return
        users = self._reduce(torch.tensor([float(p.grad is not None) for p in parameters]), "sum")
        for p, used in zip(parameters, users.tolist(), strict=True):
            if used and p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            mean = self._reduce(torch.cat([gradient.flatten() for gradient in bucket]), "mean")
            parts = mean.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def begin_alike(self, parameters: Iterable[nn.Parameter]) -> None:
        from accelerate.utils import broadcast

        for p in parameters:
            broadcast(p.data)

    @contextmanager
    def first_then_others(self) -> Iterator[None]:
        turn = f"fastweights/turn-{next(_TURNS)}"
        if not self.is_first and _await(turn) == FAILED:
            raise OtherProcessError("the first process of this run has failed, and says why")
        outcome = FAILED
        try:
            yield
            outcome = DONE
        except Stopped:
            outcome = DONE
            raise
        finally:
            if self.is_first:
                _store().set(turn, outcome)

    def hand_out(self, value: T) -> T:
        from accelerate.utils import broadcast_object_list

        with self.first_then_others():
            pass
        return broadcast_object_list([value])[0]

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        from accelerate.utils import reduce

        reduced = reduce(tensor.to(self.device), how)
        assert isinstance(reduced, Tensor)
        return reduced


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype, as many as are sent at once."""
    bucket, size = list[Tensor](), 0
    for gradient in sorted(gradients, key=lambda one: str(one.dtype)):
        if bucket and (size >= BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


def _await(turn: str) -> str:
    """What the first process wrote of its turn; it may take hours, which no collective waits."""
    while not _store().check([turn]):
        time.sleep(BETWEEN_LOOKS)
    return _store().get(turn).decode()


@contextmanager
def connected() -> Iterator[None]:
    """Say what it means if an exchange with other processes fails, in a block or a function."""
    try:
        yield
    except RuntimeError as error:
        said, of_exchange = str(error).lower(), isinstance(error, distributed.DistError)
        if not of_exchange and not _is_unlike(said) and not any(word in said for word in _GLOO):
            raise
        raise LostProcessError(f"another process of this run {_what_happened(said)}") from error


def _is_unlike(said: str) -> bool:
    """Whether processes have exchanged unlike tensors; torch's allocators enforce things, too."""
    return "expects same model" in said or ("gloo" in said and "enforce fail" in said)


def _what_happened(said: str) -> str:
    if _is_unlike(said):
        return "computes otherwise; start all of them with the same command, versions and text"
    late = "timed out" in said or "timeout" in said
    return (
        f"has {'not answered in time' if late else 'ended early'}; if none says why, look whether"
        " the machine ran out of memory; start all of them again to resume"
    )


@connected()
def join_processes(device: torch.device | None = None, patience: float = PATIENCE) -> Processes:
    """Return the group of processes that this one was launched with.

    Args:
        device: Where a single process computes; None for an accelerator if there is one. Each of
            several processes has its own device.
        patience: Seconds after which the processes fail to meet, or an exchange between them fails.

    Raises:
        LostProcessError: If they have not all met within that time.
    """
    from accelerate import PartialState

    cpu, timeout = device is not None and device.type == "cpu", timedelta(seconds=patience)
    state: Any = PartialState(cpu=cpu, timeout=timeout, **_meet_after_restart(timeout))
    if state.num_processes == 1:
        return Alone(state.device if device is None else device)
    return Launched(state)


def _meet_after_restart(timeout: timedelta) -> dict[str, Any]:
    """Where processes that torchelastic has started again meet.

    Its store outlives them, with what they left there before: addresses, and notes of their turns.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if count == "0":
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    own = distributed.distributed_c10d.PrefixStore(f"fastweights/restart-{count}", store)
    return {"store": own, "rank": rank, "world_size": world_size}


def has_group() -> bool:
    """Whether this process has met those that it was launched with."""
    return distributed.is_initialized()


def is_first_to_speak() -> bool:
    """Whether no other process of the group has asked this before.

    What the first one says is the error of all: whatever another meets later follows from it.
    """
    try:
        return _store().add(SPOKEN, 1) == 1
    except RuntimeError:  # the process with the store was killed: a failed one would still wait
        return True


def leave_processes() -> None:
    """End the group that `join_processes` has joined, if there is one."""
    if not has_group():
        return
    from accelerate import PartialState

    store, count, keeps = _store(), distributed.get_world_size(), distributed.get_rank() == 0
    distributed.destroy_process_group()
    PartialState._reset_state()
    end = time.monotonic() + FAREWELL
    with suppress(RuntimeError):
        left = store.add("fastweights/left", 1)
        while keeps and left < count and time.monotonic() < end:
            time.sleep(BETWEEN_LOOKS)
            left = store.add("fastweights/left", 0)


def _store() -> Any:
    """What the processes of the group write notes to each other in."""
    return distributed.distributed_c10d._get_default_store()
