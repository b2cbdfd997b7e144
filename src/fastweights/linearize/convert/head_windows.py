"""Key heads with windows, and numbers of landmarks, of their own, as one branch.

Heads differ in how far they look back: at an equal state, long windows for those that look far and
short ones for the others leave less of softmax's output out than one window for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import Kept
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.past import Past, PastReader
from fastweights.recurrence import State
from fastweights.recurrence.head_groups import HeadGroups
from fastweights.recurrence.streams import state_parts
from fastweights.shapes import Mask, Segments


class GroupedBranch(LinearBranch):
    """A branch for the key heads of each size, which together read as one.

    The cache keeps what the branches keep, one group after the other, and the sinks' keys of all
    heads once.

    Args:
        attention: The attention that it replaces.
        config: The linear attention, with sizes for this layer's key heads.
        kind: The class of the branches.
    """

    def __init__(
        self, attention: AttentionLayer, config: LinearAttentionConfig, kind: type[LinearBranch]
    ) -> None:
        super().__init__(attention, config)
        sizes = config.heads_of(attention)
        self.key_heads = [
            [head for head, own in enumerate(sizes) if own == size] for size in sorted(set(sizes))
        ]
        repeats = attention.heads // attention.kv_heads
        self.query_heads = [
            [head * repeats + i for head in heads for i in range(repeats)]
            for heads in self.key_heads
        ]
        self.groups = nn.ModuleList(
            kind(
                replace(attention, heads=len(heads) * repeats, kv_heads=len(heads)),
                config.of_head(*sizes[heads[0]]),
            )
            for heads in self.key_heads
        )
        for group, heads in zip(self.branches, self.key_heads, strict=True):
            group.past_heads = heads
        self.order = _places(self.query_heads)

    @property
    def branches(self) -> tuple[LinearBranch, ...]:
        """Those of the groups."""
        return tuple(cast(LinearBranch, group) for group in self.groups)

    def reset_parameters(self) -> None:
        for group in self.branches:
            group.reset_parameters()

    @property
    def reader(self) -> PastReader | None:
        return self.branches[0].reader

    def align(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        keep: Mask | None,
        segments: Segments | None,
        kept: Kept,
    ) -> tuple[Tensor, Tensor]:
        # what turns one head turns all of them, and all count the same tokens
        return self.branches[0].align(q, k, positions, keep, segments, kept)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> HeadGroups:
        return self.project_behind((), q, k, v, None, None)

    def project_behind(
        self,
        past: Past,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None,
        segments: Segments | None,
    ) -> HeadGroups:
        parts = zip(self.branches, self.query_heads, self.key_heads, strict=True)
        return HeadGroups(
            tuple(
                group.project_behind(
                    past,
                    q[:, :, queries],
                    k[:, :, own],
                    v[:, :, own],
                    keep,
                    segments,
                )
                for group, queries, own in parts
            ),
            self.order,
        )

    @property
    def keeps_states(self) -> bool:
        return False

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        parts = self.divide(state_parts(state))
        return tuple(
            tensor
            for group, part in zip(self.branches, parts, strict=True)
            for tensor in group.to_cache(part)
        )

    def from_cache(self, kept: tuple[Tensor, ...], record: Any, past: Past) -> State:
        parts = zip(self.branches, self.divide(kept), record.groups, strict=True)
        return tuple(
            tensor
            for group, part, own in parts
            for tensor in state_parts(group.from_cache(part, own, past))
        )

    def cached_tokens(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Mask]:
        parts = zip(self.branches, self.divide(kept), strict=True)
        found = [group.cached_tokens(part) for group, part in parts]
        # the tokens that every group still has
        least = min(there.shape[1] for _, _, there in found)
        keys, values, there = zip(*(_last(tokens, least) for tokens in found), strict=True)
        order = list(_places(self.key_heads))
        return torch.cat(keys, 1)[:, order], torch.cat(values, 1)[:, order], there[0]

    def divide(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the groups' tensors, of which each has as many."""
        size = len(tensors) // len(self.groups)
        return [tuple(tensors[i : i + size]) for i in range(0, len(tensors), size)]


def _places(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Where each head is among the groups' heads, one group after the other."""
    heads = [head for group in groups for head in group]
    return tuple(heads.index(head) for head in range(len(heads)))


def _last(tokens: tuple[Tensor, Tensor, Mask], count: int) -> tuple[Tensor, Tensor, Mask]:
    """The last tokens that are there, `count` places."""
    keys, values, there = tokens
    # those that are there last, in their order
    places = there.int().argsort(dim=1, stable=True)[:, there.shape[1] - count :]
    k, v = (s.take_along_dim(places[:, None, :, None], 2) for s in (keys, values))
    return k, v, there.gather(1, places)
