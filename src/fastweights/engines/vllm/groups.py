"""A step's tokens in groups that are read side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences that read as many tokens each.

    Attributes:
        tokens: ``[n t]``, the places of their tokens among those of the step.
        slots: ``[n]``, the numbers of their pages.
        begins: Whether these are their first tokens, so that nothing is in their pages yet.
    """

    tokens: Tensor
    slots: Tensor
    begins: bool


def group(
    starts: Sequence[int], lengths: Sequence[int], slots: Tensor, device: torch.device
) -> list[Group]:
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
            rows.setdefault((end - start, length <= end - start), []).append(row)
    groups = []
    for (count, begins), chosen in rows.items():
        first = torch.tensor([starts[row] for row in chosen], device=device)
        tokens = first[:, None] + torch.arange(count, device=device)
        index = torch.tensor(chosen, device=slots.device)
        groups.append(Group(tokens, slots[index].long(), begins))
    return groups
