"""How a recurrence is evaluated: token by token, chunk by chunk, all at once, or by a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels import select
from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.pages import InPages, load_and_store
from fastweights.recurrence.base import CHUNK, Recurrence
from fastweights.recurrence.effects import Neighbours
from fastweights.recurrence.streams import State, disable_autocast


class Method(ABC):
    """A way to evaluate any recurrence. All ways agree, gradients included, up to rounding."""

    @abstractmethod
    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        """Evaluate a record with at least one token from `state`.

        Returns:
            o ``[b t h v]`` and the state after the last token.
        """

    @property
    def neighbours(self) -> Neighbours | None:
        """The processes that hold the tokens before and after; None where this one holds all."""
        return None

    def without_state(self) -> Method:
        """The method for a caller that does not go on: what it returns as a state may be ()."""
        return self


@dataclass(frozen=True)
class Recurrent(Method):
    """Evaluate one token after the other by `Recurrence.step`: the definition of the rule.

    Time O(T), one token at a time; every other method is tested against this one.
    """

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        outputs = []
        for token in recurrence.split(1):
            o, state = token.step(state)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state


@dataclass(frozen=True)
class Chunkwise(Method):
    """Evaluate chunks of `size` tokens in parallel and hand the state from one to the next.

    Time and memory O(T · size). Uses plain torch (`Recurrence.chunk`), never a kernel.

    Attributes:
        size: Tokens per chunk, 1 or more.
    """

    size: int = CHUNK

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Chunkwise(size={self.size}): a chunk has at least one token")

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return chunk_loop(recurrence, state, self.size)


@dataclass(frozen=True)
class Parallel(Method):
    """Evaluate all tokens in one chunk, through the attention map: O(T²) time and memory."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return recurrence.chunk(state)


@dataclass(frozen=True)
class Auto(Method):
    """Evaluate by the first kernel that takes the record; `kernels.explain` says which."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return select(recurrence).compute(recurrence, state)


def require_method(method: object) -> None:
    """Raise TypeError unless `method` is a Method."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method = {method!r}; pass Auto(), Recurrent(), Chunkwise(size) or Parallel(), or a"
            " Method of your own"
        )


def evaluate(
    recurrence: Recurrence, state: State | None = None, method: Method = Auto()
) -> tuple[Tensor, State]:
    """Evaluate a recurrence over all its tokens.

    Args:
        recurrence: The streams of a rule, such as ``Decay(q, k, v, log_decay)``.
        state: The state before the first token, as an earlier call returned it; None: the empty
            one.
        method: How to evaluate; all methods agree, gradients included.

    Returns:
        The output o ``[b t h v]`` and the state after the last token, from which the next call
        continues.

    Raises:
        ShapeError: The state is not one of this recurrence.
        TypeError: `method` is no Method.
    """
    require_method(method)
    start: State = recurrence.initial_state() if state is None else recurrence.adopt(state)
    if recurrence.shape[1] == 0:
        return recurrence.empty_output(), start
    with disable_autocast(recurrence.device):
        return method.evaluate(recurrence, start)


@contextmanager
def set_method(parts: Iterable[Any], method: Method) -> Iterator[None]:
    """Let parts of a model that have a `method` evaluate by this one, for the length of a block."""
    before = [(part, part.method) for part in parts]
    try:
        for part, _ in before:
            part.method = method
        yield
    finally:
        for part, own in before:
            part.method = own


@torch.no_grad()
def advance(recurrence: Recurrence, state: State, pages: Tensor, method: Method = Auto()) -> Tensor:
    """Evaluate a recurrence from states that lie in pages, and leave those behind it there.

    Args:
        recurrence: Streams of b sequences.
        state: The states of all n pages, tensors ``[n …]`` of the shapes and dtypes that
            `Recurrence.settle` gives them.
        pages: ``[b]``, the number of each sequence's page, no number twice.
        method: How to evaluate.

    Returns:
        The output o ``[b t h v]``, without gradients.

    Raises:
        ShapeError: The states are none of this recurrence.
        TypeError: `method` is no Method.
    """
    return _evaluate_in_pages(InPages(recurrence, state, pages), method)


@torch.no_grad()
def begin(recurrence: Recurrence, state: State, pages: Tensor, method: Method = Auto()) -> Tensor:
    """Evaluate a recurrence from the empty state, and leave the states behind it in pages; else as
    `advance`.
    """
    return _evaluate_in_pages(InPages(recurrence, state, pages, begins=True), method)


def _evaluate_in_pages(record: InPages, method: Method) -> Tensor:
    require_method(method)
    recurrence = record.recurrence
    if recurrence.shape[1] == 0:
        return load_and_store(record, lambda _, before: (recurrence.empty_output(), before))
    with disable_autocast(recurrence.device):
        if isinstance(method, Auto):
            return select(record).compute(record)
        return load_and_store(record, method.evaluate)
