"""What a projection may know of the tokens before: positions, documents and the tails of
convolutions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.streams import find_segment_starts
from fastweights.shapes import Embedded, Mask, Segments


class TokenContext:
    """What came before the tokens at hand, and which of them are padding or begin a document.

    A projection asks it for positions and for the tails of its short convolutions, and leaves new
    tails in it, always in the same order.

    Attributes:
        keep: ``[b t]`` bool or None: False marks padding
        segments: ``[b t]`` or None: a new value begins a document
    """

    def __init__(
        self,
        x: Embedded,
        tails: tuple[Tensor, ...] | None,
        position: Tensor | None,
        keep: Mask | None,
        segments: Segments | None,
    ) -> None:
        self.keep = keep
        self.document = None if segments is None else find_segment_starts(segments).cumsum(1)
        self._old = None if tails is None else iter(tails)
        self._before = (
            position if position is not None else x.new_zeros(x.shape[0], dtype=torch.long)
        )
        self._length = x.shape[1]
        self.tails: tuple[Tensor, ...] = ()

    @property
    def positions(self) -> Tensor:
        """``[b t]``: how many tokens of its document precede each token, padding not counted."""
        seen = self._tokens_before
        return seen if self.document is None else seen - self._tokens_of_earlier_documents(seen)

    @property
    def position(self) -> Tensor:
        """``[b]``: how many tokens of its document precede the next one."""
        seen = self._before + (self._length if self.keep is None else self.keep.sum(1))
        return (
            seen
            if self.document is None
            else seen - F.pad(self._tokens_of_earlier_documents(self._tokens_before), (1, 0))[:, -1]
        )

    @property
    def _tokens_before(self) -> Tensor:
        """``[b t]``: how many tokens of any document precede each token."""
        if self.keep is None:
            return self._before[:, None] + torch.arange(self._length, device=self._before.device)
        return self._before[:, None] + self.keep.long().cumsum(1) - self.keep.long()

    def _tokens_of_earlier_documents(self, seen: Tensor) -> Tensor:
        """``[b t]``: how many of them belong to earlier documents."""
        assert self.document is not None
        return seen.masked_fill(~find_segment_starts(self.document), 0).cummax(1).values

    def tail(self, x: Tensor, length: int) -> Tensor:
        """The last `length` inputs of this convolution before `x`: zeros at the start of a
        sequence.
        """
        if self._old is None:
            return x.new_zeros(x.shape[0], length, x.shape[2])
        return next(self._old).to(x.dtype)

    def save_tail(self, tail: Tensor) -> None:
        self.tails = (*self.tails, tail)
