"""What a projection may know of the tokens before: positions, documents and the tails of
convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.streams import ShapeError, find_segment_starts
from fastweights.shapes import Embedded, Mask, Segments


class TokenContext:
    """What came before the tokens at hand, and which of them are padding or begin a document.

    A projection asks it for positions and, by name, for the tails of its short convolutions, and
    leaves new tails in it.

    Attributes:
        keep: ``[b t]`` bool or None: False marks padding
        document: ``[b t]`` numbers of the documents at hand, or None for one
        tails: what follows needs of these tokens, by the convolutions' names
    """

    def __init__(
        self,
        x: Embedded,
        tails: Mapping[str, Tensor] | None,
        position: Tensor | None,
        keep: Mask | None,
        segments: Segments | None,
    ) -> None:
        self.keep = keep
        self.document = None if segments is None else find_segment_starts(segments).cumsum(1)
        self._old = tails
        self._before = (
            position if position is not None else x.new_zeros(x.shape[0], dtype=torch.long)
        )
        self._length = x.shape[1]
        self.tails: dict[str, Tensor] = {}

    @classmethod
    def start(cls, x: Embedded) -> Self:
        """Of the first tokens of sequences of one document, none of them padding."""
        return cls(x, None, None, None, None)

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

    def tail(self, name: str, x: Tensor, length: int) -> Tensor:
        """The last inputs of a convolution before `x`.

        Args:
            name: the convolution's
            x: its input, ``[b t c]``
            length: how many inputs it needs

        Returns:
            ``[b length c]``, zeros at the start of a sequence.

        Raises:
            LookupError: if the state that goes on has no tail of this name
            ShapeError: if that is of another batch, or of another mixer
        """
        shape = (x.shape[0], length, x.shape[2])
        if self._old is None:
            return x.new_zeros(shape)
        tail = self._old.get(name)
        if tail is None:
            raise LookupError(
                f"the state has no tail of a convolution {name!r}, only of {sorted(self._old)}: a"
                " convolution reads every token of a sequence or none, in one mixer"
            )
        if tail.shape != shape:
            raise ShapeError(
                f"the state's tail of the convolution {name!r} has shape {list(tail.shape)}, must"
                f" be [batch, inputs, channels] = {list(shape)}; go on from a state of this mixer"
                " and of these sequences"
            )
        return tail.to(x.dtype)

    def save_tail(self, name: str, tail: Tensor) -> None:
        """Leave the last inputs of the convolution of this name.

        Raises:
            ValueError: if one of this name has left its own
        """
        if name in self.tails:
            raise ValueError(
                f"two convolutions called {name!r} read one sequence; a mixer names those that are"
                " in what is set as its attribute, and each is called once"
            )
        self.tails[name] = tail
