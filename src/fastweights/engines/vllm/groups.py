"""A step's tokens in groups that are read side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LONGEST_PADDED = 512
"""Tokens from which on a sequence is worth reading without others of another length."""


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Sequences of about as many tokens each, of which the shorter are padded.

    Attributes:
        tokens: ``[n t]``, the places of their tokens among those of the step; padding has that of
            the sequence's last one.
        slots: ``[n]``, the numbers of their pages.
        begins: Whether these are their first tokens, so that nothing is in their pages yet.
        keep: ``[n t]``, False for padding; None if there is none.
        first: The place of the first token, if the others stand behind it in their order.
    """

    tokens: Tensor
    slots: Tensor
    begins: bool
    keep: Tensor | None = None
    first: int | None = None

    def is_all_of(self, count: int) -> bool:
        """Whether these are all of a step's tokens, in their order."""
        return self.first == 0 and self.tokens.numel() == count

    def take(self, stream: Tensor) -> Tensor:
        """Theirs ``[n t …]`` of a stream of all tokens of the step."""
        if self.first is None:
            return stream[self.tokens]
        n, t = self.tokens.shape
        return stream[self.first : self.first + n * t].unflatten(0, (n, t))

    def put(self, stream: Tensor, own: Tensor) -> None:
        """Write theirs ``[n t …]`` into a stream of all tokens of the step."""
        if self.first is not None:
            stream[self.first : self.first + self.tokens.numel()] = own.flatten(0, 1)
        elif self.keep is None:
            stream[self.tokens] = own
        else:
            stream[self.tokens[self.keep]] = own[self.keep]


def group(
    starts: Sequence[int], lengths: Sequence[int], slots: Tensor, device: torch.device
) -> list[LayerGroup]:
    """Group the sequences of a step by how many tokens they read, and whether it is their first.

    Args:
        starts: The place of each sequence's first token, and one more, behind the last token.
        lengths: How many tokens each has read after the step; 0 for rows that stand for none.
        slots: ``[n]``, the numbers of their pages.
        device: Where the tokens are.
    """
    rows: dict[tuple[int, bool], list[int]] = {}
    for row, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end > start:
            key = padded_length(end - start), length <= end - start
            rows.setdefault(key, []).append(row)
    return [
        _group([(starts[row], starts[row + 1]) for row in chosen], slots[chosen], begins, device)
        for (_, begins), chosen in rows.items()
    ]


def padded_length(count: int) -> int:
    """The number up to which sequences of so many tokens may be padded: by a quarter of them, or
    16, at most; one token stays one, and so do many.
    """
    if count == 1 or count > LONGEST_PADDED:
        return count
    step = max(16, 1 << (count - 1).bit_length() >> 3)
    return -(-count // step) * step


def _group(
    spans: list[tuple[int, int]], slots: Tensor, begins: bool, device: torch.device
) -> LayerGroup:
    first, last = torch.tensor(spans, device=device).T[..., None].unbind(0)
    counts = [end - start for start, end in spans]
    column = torch.arange(max(counts), device=device)
    tokens, slots = first + column, slots.long()
    if min(counts) < max(counts):
        keep = tokens < last
        return LayerGroup(torch.minimum(tokens, last - 1), slots, begins, keep)
    in_order = all(end == start for (_, end), (start, _) in pairwise(spans))
    return LayerGroup(tokens, slots, begins, first=spans[0][0] if in_order else None)
