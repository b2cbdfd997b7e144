"""What one call has a model read: vectors of tokens, padding among them, and documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from fastweights.recurrence.derivatives import transform_here
from fastweights.shapes import Embedded, Mask, Segments


def cheap_to_look_at(x: Tensor) -> bool:
    """Whether values can be read without waiting for an accelerator, and outside of graphs and
    transforms.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or transform_here():
        return False
    return x.device.type == "cpu" and x.numel() > 0


def worth_waiting_for(x: Tensor) -> bool:
    """Whether what values decide (a faster path) is worth waiting for them: outside of training,
    whose steps follow each other on an accelerator without the host.
    """
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor) or transform_here():
        return False
    return cheap_to_look_at(x) or not torch.is_grad_enabled()


@dataclass(frozen=True)
class Tokens:
    """Tokens to be read one after the other.

    Attributes:
        x: ``[b t d]``, their vectors.
        keep: ``[b t]``, False for padding; None without padding.
        segments: ``[b t]``, how many documents have begun among them, so that 1 at the first token
            says that it does not go on from what was read before; None for none.
        follows: Whether the first token is known to go on, so that nobody need look.
    """

    x: Embedded
    keep: Mask | None = None
    segments: Segments | None = None
    follows: bool = True

    @property
    def length(self) -> int:
        """The number of tokens t of each sequence."""
        return self.x.shape[1]

    @property
    def begins_anew(self) -> bool:
        """Whether a document begins, or may for all that is known, at some sequence's first
        token.
        """
        if self.follows or self.segments is None or torch.compiler.is_compiling():
            return False
        first = self.segments[:, 0]
        return not worth_waiting_for(first) or bool(first.any())

    def map(self, f: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply `f` to every tensor: to select, repeat or cut sequences."""
        keep, segments = (None if part is None else f(part) for part in (self.keep, self.segments))
        return replace(self, x=f(self.x), keep=keep, segments=segments)

    def cut(self, place: int) -> tuple[Tokens, Tokens]:
        """Return the first `place` tokens, of which there is one at least, and the others."""
        first, second = self.map(lambda s: s[:, :place]), self.map(lambda s: s[:, place:])
        if first.segments is None or second.segments is None:
            return first, second
        numbered = second.segments - first.segments[:, -1:]
        return first, replace(second, segments=numbered, follows=False)

    def after(self, earlier: Tokens) -> Tokens:
        """Return these tokens behind `earlier` ones."""
        masked = self.keep is not None or earlier.keep is not None
        return Tokens(
            torch.cat([earlier.x, self.x], 1),
            torch.cat([_kept(earlier), _kept(self)], 1) if masked else None,
            _documents(earlier, self),
            earlier.follows,
        )

    def behind_padding(self) -> Tokens:
        """Return the tokens behind one of padding, so that a document that begins with the first of
        them has a token to differ from: what a cache holds belongs to the padding's document.
        """
        first = self.x[:, :1]
        return self.after(Tokens(first, torch.zeros_like(first[..., 0], dtype=torch.bool)))


def _kept(tokens: Tokens) -> Mask:
    if tokens.keep is not None:
        return tokens.keep
    return torch.ones_like(tokens.x[..., 0], dtype=torch.bool)


def _documents(earlier: Tokens, later: Tokens) -> Segments | None:
    if earlier.segments is None:
        return None if later.segments is None else F.pad(later.segments, (earlier.length, 0))
    begun = earlier.segments[:, -1:]
    following = begun.expand(-1, later.length) if later.segments is None else later.segments + begun
    return torch.cat([earlier.segments, following], 1)
