"""States that are advanced where they lie: in pages, of which an engine has one per sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.streams import pack_state, state_parts


@dataclass(frozen=True, eq=False)
class InPages:
    """A record of some sequences whose states lie in pages, and stay there.

    Attributes:
        recurrence: of b sequences
        state: those of all n pages, as `Recurrence.settle` returns states: tensors ``[n …]``
        pages: ``[b]``, the number of each sequence's page, no number twice
        begins: whether nothing is before these tokens, whatever the pages hold
    """

    recurrence: Recurrence
    state: State
    pages: Tensor
    begins: bool = False

    @property
    def device(self) -> torch.device:
        return self.recurrence.device

    @property
    def step(self) -> int:
        """Bytes from one page to the next."""
        return _step(next(part for part in state_parts(self.state) if part.numel()))

    def scattered(self) -> str | None:
        """Why C does not find the states by the address of page 0; None if it does."""
        parts = [part for part in state_parts(self.state) if part.numel()]
        if self.pages.dtype != torch.long or not self.pages.is_contiguous():
            return "the numbers of its pages are not contiguous int64"
        if len({_step(part) for part in parts}) > 1 or not all(p[0].is_contiguous() for p in parts):
            return "the tensors of its states do not lie in pages"
        return None


def load(paged: Sequence[Tensor], pages: Tensor) -> tuple[Tensor, ...]:
    """Copies ``[b …]`` of tensors ``[n …]`` in the pages with these numbers ``[b]``."""
    return tuple(part.index_select(0, pages) for part in paged)


def store(paged: Sequence[Tensor], pages: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write tensors ``[b …]`` where `load` takes them from."""
    for part, tensor in zip(paged, tensors, strict=True):
        part.index_copy_(0, pages, tensor.to(part.dtype))


def load_and_store(
    record: InPages, evaluate: Callable[[Recurrence, State], tuple[Tensor, Any]]
) -> Tensor:
    """o of a record that is evaluated from copies of its states, which are copied back."""
    recurrence, pages, paged = record.recurrence, record.pages, state_parts(record.state)
    if record.begins:
        before = recurrence.initial_state()
    else:
        before = recurrence.adopt(pack_state(load(paged, pages)))
    o, after = evaluate(recurrence, before)
    store(paged, pages, state_parts(recurrence.settle(after)))
    return o


def _step(part: Tensor) -> int:
    return part.stride(0) * part.itemsize


COPIED_PAGES = Kernel(
    "loaded from pages and stored", InPages, lambda record: load_and_store(record, run_fastest)
)
