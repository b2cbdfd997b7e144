"""What a branch's projections read of the tokens before, which the cache keeps behind a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fastweights.recurrence import Recurrence
from fastweights.shapes import Mask, Segments

Past = tuple[Tensor, ...]
"""Batch-first tensors of constant size; none where projections read a token alone."""


@dataclass(frozen=True, eq=False)
class ProjectedTokens:
    """A record, and what the next tokens' projections may read of its tokens.

    Attributes:
        record: The recurrence of the projected streams.
        inputs: What was projected, ``[b t …]``.
        keep: ``[b t]``, False for padding; None if there is none.
        segments: ``[b t]``, the number of each token's document; None if there is one.
    """

    record: Recurrence
    inputs: Tensor
    keep: Mask | None
    segments: Segments | None

    def __len__(self) -> int:
        return self.inputs.shape[1]

    def __getitem__(self, part: slice) -> ProjectedTokens:
        keep, segments = (x if x is None else x[:, part] for x in (self.keep, self.segments))
        return ProjectedTokens(self.record[part], self.inputs[:, part], keep, segments)


BranchTokens = Recurrence | ProjectedTokens
"""What a branch has made of some tokens."""


class PastReader(Protocol):
    """What of a branch reads tokens before those that it projects.

    Attributes:
        parts: The number of tensors that are kept.
    """

    @property
    def parts(self) -> int: ...

    def inputs_of(self, q: Tensor, k: Tensor) -> Tensor:
        """Return what it reads of queries ``[b t h k]`` and keys ``[b t g k]``, ``[b t …]``."""
        ...

    def empty(self, inputs: Tensor) -> Past:
        """Return what is kept before the first token of such inputs."""
        ...

    def after(self, past: Past, tokens: ProjectedTokens) -> Past:
        """Return what is kept behind `tokens`, by what was kept before them."""
        ...
