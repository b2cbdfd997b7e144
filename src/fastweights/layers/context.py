"""What a projection may know of the tokens before: positions, documents and the tails of
convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.effects import Effect, Neighbours
from fastweights.recurrence.streams import ShapeError, find_segment_starts
from fastweights.shapes import Embedded, Mask, Segments

ANY = torch.iinfo(torch.long).min
"""The id of a document that the first token continues, whatever its own id is."""


def _differs(first: Tensor, document: Tensor) -> Tensor:
    return (document != ANY) & (first != document)


@dataclass(frozen=True, eq=False)
class DocumentEffect(Effect[tuple[Tensor, Tensor]]):
    """What tokens do to (position, id of the document) of the next one, ``[b]`` each.

    Attributes:
        first, last: the ids of the first and the last token's documents
        position: how many tokens of the last one's document are among them, padding not counted
        begun: whether a document begins behind the first token
    """

    first: Tensor
    last: Tensor
    position: Tensor
    begun: Tensor

    def after(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        position, document = state
        fresh = self.begun | _differs(self.first, document)
        return self.position + position.masked_fill(fresh, 0), self.last


@dataclass(frozen=True, eq=False)
class TailEffect(Effect[Tensor]):
    """What tokens do to the tail ``[b n c]`` of a convolution.

    Attributes:
        inputs: the last n inputs of the last document, the newest last, ``[b n c]``
        count: how many of them there are, ``[b 1]``
        fresh: whether a document begins among the tokens, ``[b 1]``
    """

    inputs: Tensor
    count: Tensor
    fresh: Tensor

    @classmethod
    def of(cls, tokens: TokenContext, x: Tensor, length: int) -> Self:
        """What the inputs x ``[b t c]`` of these tokens do to a tail of so many."""
        b, t, _ = x.shape
        lasting = torch.ones(b, t, dtype=torch.bool, device=x.device)
        fresh = torch.zeros(b, 1, dtype=torch.bool, device=x.device)
        if tokens.keep is not None:
            lasting = lasting & tokens.keep
        if (document := tokens.document) is not None:
            lasting = lasting & (document == document[:, -1:])
            fresh = document[:, -1:] > 0
        # those that last in front of the end, in their order
        order = lasting.long().argsort(dim=1, stable=True)[:, max(t - length, 0) :]
        inputs = x.take_along_dim(order[..., None], 1)
        inputs = F.pad(inputs, (0, 0, length - inputs.shape[1], 0))
        return cls(inputs, lasting.sum(1, keepdim=True).clamp(max=length), fresh)

    def after(self, state: Tensor) -> Tensor:
        n = state.shape[1]
        place = torch.arange(n, device=state.device)
        own = place >= n - self.count
        earlier = state.take_along_dim((place + self.count).clamp(max=n - 1)[..., None], 1)
        earlier = earlier.masked_fill(self.fresh[..., None], 0)
        return torch.where(own[..., None], self.inputs, earlier)


@dataclass
class LayerStream:
    """What one layer says of the tokens at hand to the layers after it.

    Attributes:
        values: ``[b t c]``, the values of the last layer that has left its own (RWKV-7's value
            residual); None while none has
        embeddings: ``[b t d]``, what the first layer reads, for layers that read it as well
            (Zamba); None where there are none
    """

    values: Tensor | None = None
    embeddings: Tensor | None = None

    @classmethod
    def stand_in(cls, x: Tensor) -> Self:
        """Of a layer that runs alone, x in place of all that others say."""
        return cls(x, x)

    def take_values(self) -> Tensor:
        """The values; raises LookupError if no layer has left any."""
        if self.values is None:
            raise LookupError(
                "this layer takes up the values of an earlier one, and none has left any; run it in"
                " a model, behind a layer with residual=False"
            )
        return self.values

    def take_embeddings(self) -> Tensor:
        """The embeddings; raises LookupError if there are none."""
        if self.embeddings is None:
            raise LookupError(
                "this layer reads the embeddings beside the stream, and there are none; run it in a"
                " model, or give it stream=LayerStream(embeddings=…)"
            )
        return self.embeddings


class TokenContext:
    """What came before the tokens at hand, and which of them are padding or begin a document.

    A projection asks it for positions and, by name, for the tails of its short convolutions, and
    leaves new tails in it.

    Attributes:
        keep: ``[b t]`` bool or None: False marks padding
        document: ``[b t]`` numbers of the documents at hand, or None for one
        starts: ``[b t]``, whether a document begins with a token; None for one document
        stream: what earlier layers say of these tokens
        tails: what follows needs of these tokens, by the convolutions' names; where processes hold
            slices of time, what follows needs of all of them
    """

    def __init__(
        self,
        x: Embedded,
        tails: Mapping[str, Tensor] | None,
        position: Tensor | None,
        keep: Mask | None,
        segments: Segments | None,
        neighbours: Neighbours | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        self.keep = keep
        self.stream = LayerStream() if stream is None else stream
        self.starts = None if segments is None else find_segment_starts(segments)
        self._old = tails
        self._neighbours = neighbours
        self._length = x.shape[1]
        before = position if position is not None else x.new_zeros(len(x), dtype=torch.long)
        self._before, self._after = before, None
        if neighbours is not None:
            self._before, self._after = self._ask_neighbours(neighbours, before, segments)
        self.document = None if self.starts is None else self.starts.cumsum(1)
        self.tails: dict[str, Tensor] = {}
        self._following: dict[str, Tensor] = {}

    @classmethod
    def start(cls, x: Embedded) -> Self:
        """Of the first tokens of sequences of one document, none of them padding; x stands for what
        other layers say.
        """
        return cls(x, None, None, None, None, stream=LayerStream.stand_in(x))

    @property
    def positions(self) -> Tensor:
        """``[b t]``: how many tokens of its document precede each token, padding not counted."""
        seen = self._tokens_from(self._before)
        return seen if self.starts is None else seen - self._tokens_of_earlier_documents(seen)

    @property
    def position(self) -> Tensor:
        """``[b]``: how many tokens of its document precede the next one."""
        return self._count_from(self._before) if self._after is None else self._after

    def _count_from(self, before: Tensor) -> Tensor:
        """``[b]``: how many tokens of its document precede the next one, from so many before."""
        seen = before + (self._length if self.keep is None else self.keep.sum(1))
        if self.starts is None:
            return seen
        earlier = self._tokens_of_earlier_documents(self._tokens_from(before))
        return seen - F.pad(earlier, (1, 0))[:, -1]

    def _tokens_from(self, before: Tensor) -> Tensor:
        """``[b t]``: how many tokens of any document precede each token."""
        if self.keep is None:
            seen = before[:, None]
            one = self._length == 1
            return seen if one else seen + torch.arange(self._length, device=before.device)
        return before[:, None] + self.keep.long().cumsum(1) - self.keep.long()

    def _tokens_of_earlier_documents(self, seen: Tensor) -> Tensor:
        """``[b t]``: how many of them belong to earlier documents."""
        assert self.starts is not None
        return seen.masked_fill(~self.starts, 0).cummax(1).values

    def _ask_neighbours(
        self, neighbours: Neighbours, position: Tensor, segments: Segments | None
    ) -> tuple[Tensor, Tensor]:
        """The positions before these tokens and behind those of all processes; whether a document
        begins with the first of these is noted in `starts`.
        """
        if self.keep is None and segments is None:
            before = position + neighbours.index * self._length
            return before, position + neighbours.count * self._length
        own, none = self._count_from(torch.zeros_like(position)), torch.zeros_like(position)
        first, last = (none, none) if segments is None else segments[:, [0, -1]].long().unbind(1)
        begun = none.bool() if self.starts is None else self.starts.any(1)
        effect = DocumentEffect(first, last, own, begun)
        state = (position, torch.full_like(position, ANY))
        (before, document), (after, _) = neighbours.carry(effect, state)
        if self.starts is not None:
            begins = _differs(first, document)[:, None]
            self.starts = torch.cat([begins, self.starts[:, 1:]], 1)
        return before, after

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
        tail = self._old_tail(name, x, length)
        if self._neighbours is None:
            return tail
        effect = TailEffect.of(self, x, length)
        tail, self._following[name] = self._neighbours.carry(effect, tail)
        return tail

    def _old_tail(self, name: str, x: Tensor, length: int) -> Tensor:
        """The inputs before the first process's, or before x where one process has all."""
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
        self.tails[name] = self._following.get(name, self.of_last_document(tail))

    def of_last_document(self, tail: Tensor) -> Tensor:
        """The tail, empty where the last document has no tokens but padding yet: those in it are of
        another.
        """
        if self.keep is None or self.document is None or not self.document.shape[1]:
            return tail
        last = self.document[:, -1:]
        seen = (self.keep & (self.document == last)).any(1, keepdim=True) | (last == 0)
        return tail.masked_fill(~seen[..., None], 0)
