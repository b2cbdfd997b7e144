"""Sinks beside landmarks: the first tokens of a document, which queries read exactly for ever.

A sink is a feature of its own: its key is a unit vector, so that S holds its value as it is, and
what the query has there is softmax's weight of the sink's key. Only that key has to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.layers import upcast
from fastweights.linearize.convert.branch import WindowedBranch
from fastweights.linearize.convert.past import Past, ProjectedTokens
from fastweights.recurrence import State, WindowedLinear
from fastweights.recurrence.mapped import features
from fastweights.recurrence.streams import disable_autocast, find_segment_starts
from fastweights.recurrence.windowed import exponentials, soft_cap
from fastweights.shapes import Mask, Segments


class DocumentPlaces(NamedTuple):
    """Where tokens stand in their documents.

    Attributes:
        rank: ``[b t]``, which token of its document each is, from 0; -1 for padding.
        document: ``[b t]``, 0 is the one of the tokens before.
        count: ``[b]``, how many tokens the last one's document has had.
        documents: No more than so many are there.
    """

    rank: Tensor
    document: Tensor
    count: Tensor
    documents: int

    @classmethod
    def of(cls, count: Tensor, t: int, keep: Mask | None, segments: Segments | None) -> Self:
        """Of `t` tokens after `count` others ``[b]`` of a document."""
        kept = count.new_ones(len(count), t, dtype=torch.bool) if keep is None else keep
        position = kept.cumsum(1)
        before, document = -count[:, None].expand_as(position), torch.zeros_like(position)
        if segments is not None:
            starts = find_segment_starts(segments)
            document = starts.cumsum(1)
            before = torch.where(starts, position - kept.long(), before).cummax(1).values
        rank = torch.where(kept, position - before - 1, -1)
        documents = 1 if segments is None else t
        return cls(rank, document, position[:, -1] - before[:, -1], documents)

    def first(self, sinks: int) -> Tensor:
        """Return where the first tokens of each document are, ``[b documents sinks]``, by their
        places among the cached sinks and the tokens behind them; a cached one's for none."""
        room = self.documents * sinks
        is_sink = (self.rank >= 0) & (self.rank < sinks)
        slot = torch.where(is_sink, self.document * sinks + self.rank, room)
        cached = torch.arange(room + 1, device=slot.device) % max(sinks, 1)
        own = torch.arange(sinks, sinks + slot.shape[1], device=slot.device)
        table = cached.expand(len(slot), -1).scatter(1, slot, own.expand_as(slot))
        return table[:, :room].unflatten(1, (self.documents, sinks))


@dataclass(frozen=True)
class SinkReader:
    """Keeps the keys of sinks ``[b sinks g k]``, zeros for those to come, and how many tokens
    their document has had ``[b]``."""

    sinks: int
    parts: ClassVar[int] = 2

    def inputs_of(self, q: Tensor, k: Tensor) -> Tensor:
        del q
        return k

    def empty(self, inputs: Tensor) -> Past:
        b, _, *shape = inputs.shape
        count = torch.zeros(b, dtype=torch.long, device=inputs.device)
        return inputs.new_zeros(b, self.sinks, *shape), count

    def after(self, past: Past, tokens: ProjectedTokens) -> Past:
        keys, count = past
        places = DocumentPlaces.of(count, len(tokens), tokens.keep, tokens.segments)
        last = places.document[:, -1, None, None].expand(-1, 1, self.sinks)
        index = places.first(self.sinks).gather(1, last)
        there = torch.arange(self.sinks, device=count.device) < places.count[:, None]
        found = _take(torch.cat([keys, tokens.inputs], 1), index)[:, 0]
        return torch.where(there[..., None, None], found, 0), places.count

    def keys_of_queries(self, keys: Tensor, k: Tensor, places: DocumentPlaces) -> Tensor:
        """Return the sinks' keys ``[b t m g k]`` of each token's document, of those that have been
        and others; ``[b 1 m g k]`` of one document."""
        index = places.first(self.sinks)
        if places.documents > 1:
            own = places.document[..., None].expand(-1, -1, self.sinks)
            index = index.gather(1, own)
        return _take(torch.cat([keys, k], 1), index)

    def mark(self, mapped: Tensor, rank: Tensor) -> Tensor:
        """Return features ``[b t g f+m]`` of tokens ``[b t]`` of these ranks: landmarks' ``[b t g
        f]``, or a sink's own."""
        own = rank[..., None] == torch.arange(self.sinks, device=rank.device)
        of_landmarks = mapped.masked_fill(own.any(-1)[..., None, None], 0)
        unit = own[:, :, None].to(mapped.dtype).expand(*mapped.shape[:3], -1)
        return torch.cat([of_landmarks, unit], -1)


def _take(keys: Tensor, index: Tensor) -> Tensor:
    """The keys ``[b s g k]`` at ``[b t m]``, ``[b t m g k]``."""
    rows = index.flatten(1)[..., None, None]
    return keys.take_along_dim(rows, 1).unflatten(1, index.shape[1:])


class SinkBranch(WindowedBranch):
    """`WindowedBranch` with landmarks and sinks, which have the weights of softmax once they have
    left the window, too."""

    @property
    def reader(self) -> SinkReader:
        return SinkReader(self.config.sinks)

    def project_behind(
        self,
        past: Past,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None,
        segments: Segments | None,
    ) -> WindowedLinear:
        record, reader = self.project(q, k, v), self.reader
        keys, count = past or reader.empty(k)
        places = DocumentPlaces.of(count, k.shape[1], keep, segments)
        sinks = reader.keys_of_queries(keys, k, places)
        by_group = upcast(record.q).unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("btgrk,btmgk->btgrm", by_group, upcast(sinks)).flatten(2, 3)
        scores = soft_cap(scores / q.shape[-1] ** 0.5, record.softcap)
        log_scale = features(record.log_scale)
        # the window's weights have a factor γ
        weights = record.mix * exponentials(scores, log_scale)
        return replace(
            record,
            fq=torch.cat([features(record.fq), weights], -1),
            fk=reader.mark(features(record.fk), places.rank),
            log_scale=log_scale,
            sinks=reader.sinks,
        )

    @property
    def keeps_states(self) -> bool:
        return False

    def from_cache(self, kept: tuple[Tensor, ...], tokens: int, past: Past) -> State:
        keys, values, _, memory, age = super().from_cache(kept, tokens, past)
        # no more of them can leave the window, and the oldest do
        first = min(tokens, keys.shape[2])
        with disable_autocast(keys.device):
            mapped = self.phi_k(keys[:, :, :first].transpose(1, 2))
        leaving = self.reader.mark(mapped, past[1][:, None] - age[:, :first]).transpose(1, 2)
        return keys, values, F.pad(leaving, (0, 0, 0, keys.shape[2] - first)), memory, age
