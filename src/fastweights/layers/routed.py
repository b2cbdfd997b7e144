"""Sequences of which each is several streams, to which a router gives some of its tokens."""

from __future__ import annotations

from torch import Tensor

from fastweights.layers.context import TokenContext
from fastweights.layers.convolution import ShortConvolution
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


def fold(x: Tensor) -> Tensor:
    """Make a sequence of every stream: ``[b t m …]`` → ``[b·m t …]``."""
    return x.transpose(1, 2).flatten(0, 1)


def unfold(x: Tensor, streams: int) -> Tensor:
    """Put the streams of a sequence side by side again: ``[b·m t …]`` → ``[b t m …]``."""
    return x.unflatten(0, (-1, streams)).transpose(1, 2)


class RoutedContext(TokenContext):
    """What came before the tokens of m streams of every sequence, as `fold` lays them out: to the
    others in its stream, a token that is given to another stream is padding.

    In the context around it, the tails of the streams of a sequence lie side by side,
    ``[b n m·c]``.

    Args:
        around: Of the sequences.
        routed: ``[b t m]``, which tokens each stream is given.
    """

    def __init__(self, around: TokenContext, routed: Tensor) -> None:
        self._around, self._streams = around, routed.shape[2]
        self._neighbours = around._neighbours
        self._following: dict[str, Tensor] = {}
        kept = routed if around.keep is None else routed & around.keep[..., None]
        self.keep = fold(kept)
        document = around.document
        self.document = None if document is None else document.repeat_interleave(self._streams, 0)

    def convolve(self, layer: ShortConvolution, x: Tensor) -> Tensor:
        """SiLU of the convolution of every stream ``[b t m c]`` on its own."""
        return unfold(layer(fold(with_room(x)), self, silu=True), self._streams)

    def _old_tail(self, name: str, x: Embedded, length: int) -> Tensor:
        streams = self._streams
        beside = x.new_empty(x.shape[0] // streams, 0, streams * x.shape[2])
        tail = self._around._old_tail(name, beside, length)
        return fold(tail.unflatten(-1, (streams, -1)))

    def save_tail(self, name: str, tail: Tensor) -> None:
        tail = self._following.get(name, self.of_last_document(tail))
        self._around.save_tail(name, unfold(tail, self._streams).flatten(2))
