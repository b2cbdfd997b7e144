"""Landmarks beside a window of softmax, and sinks: the first tokens of a document, which queries
read exactly for ever.

Landmarks read queries and keys as they were before rotary positions, so that they stand for keys at
any position. A sink is a feature of its own: its key is a unit vector, so that S holds its value as
it is, and what the query has there is softmax's weight of the sink's key. Only that key has to be
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.features import Landmarks
from fastweights.layers import upcast
from fastweights.linearize.convert.branch import ON_ONE_SCALE, WindowedBranch
from fastweights.linearize.convert.cache import Kept
from fastweights.linearize.convert.past import Past, ProjectedTokens
from fastweights.recurrence import State, WindowedLinear
from fastweights.recurrence.mapped import LogScale, Mapped
from fastweights.recurrence.streams import at_most, disable_autocast, find_segment_starts
from fastweights.recurrence.windowed import soft_cap
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
        kept = count.new_ones(count.shape[0], t, dtype=torch.bool) if keep is None else keep
        position = kept.cumsum(1)
        # kept tokens before each document's first; the cached document's lie before these, below 0
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
        # each document's sinks have slots, and all other tokens one more, which is cut off
        slot = torch.where(is_sink, self.document * sinks + self.rank, room)
        # a slot has the cached sink of its rank unless one of these tokens is that sink
        cached = torch.arange(room + 1, device=slot.device) % max(sinks, 1)
        own = torch.arange(sinks, sinks + slot.shape[1], device=slot.device)
        table = cached.expand(slot.shape[0], -1).scatter(1, slot, own.expand_as(slot))
        return table[:, :room].unflatten(1, (self.documents, sinks))


def at_least(count: Tensor, tokens: int) -> bool:
    """Whether all of ``count [b]`` are, which is asked where the answer is at hand."""
    if torch.compiler.is_compiling() or count.device.type != "cpu":
        return False
    return int(count.min() if len(count) > 1 else count) >= tokens


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
        if tokens.keep is None and tokens.segments is None and at_least(count, self.sinks):
            return keys, count + len(tokens)
        places = DocumentPlaces.of(count, tokens.inputs.shape[1], tokens.keep, tokens.segments)
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
    first = keys.shape[1] * torch.arange(keys.shape[0], device=keys.device)
    rows = (index + first[:, None, None]).flatten()
    return keys.flatten(0, 1).index_select(0, rows).unflatten(0, index.shape)


class _JointMaps(NamedTuple):
    """The maps to landmarks and the sinks of one sequence, and what they were made of: `keys` of
    all the layer's heads."""

    keys: Tensor
    versions: tuple[tuple[int, int], ...]
    phi_q: Landmarks
    phi_k: Landmarks


class LandmarkBranch(WindowedBranch):
    """`WindowedBranch` with landmarks, and sinks as further ones of every document: φ(q) is the
    softmax over both, in which sinks have the factor γ of the window's weights.

    Both sides are on one scale, so that the window's weights and those of the tokens before it are
    softmax's, as far as landmarks stand for keys. A token's position is its place in its document:
    `align` turns back what other positions have turned further.
    """

    phi_q: Landmarks
    phi_k: Landmarks
    joint: _JointMaps | None = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.mix, ON_ONE_SCALE)

    @property
    def reader(self) -> SinkReader:
        return SinkReader(self.config.sinks)

    def align(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        keep: Mask | None,
        segments: Segments | None,
        kept: Kept,
    ) -> tuple[Tensor, Tensor]:
        _, count = self._split(kept)[1] or self.reader.empty(k)
        rank = DocumentPlaces.of(count, k.shape[1], keep, segments).rank
        # how far a token's position is beyond its place in its document
        ahead = torch.where(rank < 0, 0, positions - rank)
        turned = self.phi_q.unrotate(q, ahead), self.phi_k.unrotate(k, ahead)
        return turned[0].to(q.dtype), turned[1].to(k.dtype)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> WindowedLinear:
        return self.project_behind((), q, k, v, None, None)

    def project_behind(
        self,
        past: Past,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None,
        segments: Segments | None,
    ) -> WindowedLinear:
        all_heads, count = past or self.reader.empty(k)
        plain = keep is None and segments is None and not torch.is_grad_enabled()
        if plain and q.shape[:2] == (1, 1) and self._reads_alone(count):
            return self._read_one(q, k, v, all_heads, int(count))
        keys = all_heads[:, :, self.past_heads] if past else all_heads
        places = DocumentPlaces.of(count, k.shape[1], keep, segments)
        mapped = self.phi_k(self.phi_k.unrotate(k, places.rank))
        if plain and self._have_left(count):
            # no sink is in the window: all are cached, and what leaves it now has landmarks alone
            sinks, future, fk = keys[:, None], None, F.pad(mapped, (0, self.config.sinks))
        else:
            sinks = self.reader.keys_of_queries(keys, k, places)
            own = torch.arange(self.config.sinks, device=k.device)
            future = (own > places.rank[..., None])[:, :, None]
            fk = self.reader.mark(mapped, places.rank)
        of_sinks = self._scores(q, sinks)
        if future is not None:
            # a sink that is still to come has no weight
            of_sinks = of_sinks.masked_fill(future, -torch.inf)
        of_landmarks = self.phi_q.scores(self.phi_q.unrotate(q, places.rank))
        scores = torch.cat([of_landmarks, of_sinks], -1)
        # what the features are relative to, which the window's weights then are too
        scale = scores.logsumexp(-1, keepdim=True)
        return self.windowed(q, k, v, scores.softmax(-1), fk, scale)

    def reads_alone(self, count: int) -> bool:
        """Whether kernels make the features of one token behind so many: all sinks have come, and
        none leaves the window with it."""
        leaving = count - max(self.config.window - 1, 0)
        return count >= self.config.sinks and not 0 <= leaving < self.config.sinks

    def _reads_alone(self, count: Tensor) -> bool:
        come = self.attention.softcap is None and at_least(count, self.config.sinks)
        return come and self.reads_alone(int(count))

    def _have_left(self, count: Tensor) -> bool:
        """Whether no sink is in the window any more, or will be, for all that autograd knows."""
        return not torch.is_grad_enabled() and at_least(count, self.all_left)

    @property
    def all_left(self) -> int:
        """Behind how many tokens no sink is in the window any more."""
        return self.config.sinks + max(self.config.window - 1, 0)

    def _scores(self, q: Tensor, sinks: Tensor) -> Tensor:
        """Those of keys ``[b t m g k]``, ``[b t h m]``, with log γ."""
        by_group = upcast(q).unflatten(2, (sinks.shape[3], -1))
        scores = torch.einsum("btgrk,btmgk->btgrm", by_group, upcast(sinks)).flatten(2, 3)
        return soft_cap(scores * self.attention.scaling, self.attention.softcap) + self._log_mix()

    def _log_mix(self) -> Tensor:
        """log γ ``[h 1]``"""
        return F.logsigmoid(upcast(self.mix))[:, None]

    def _read_one(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, position: int
    ) -> WindowedLinear:
        """The record of one token, whose features kernels make."""
        own, joint = (self.phi_q.W, self.phi_q.b, self.phi_k.W, self.phi_k.b, self.mix), self.joint
        # what changes a tensor in place counts its versions, but for those of inference mode
        versions = tuple((p.data_ptr(), p._version) for p in own if not p.is_inference())
        same = joint is not None and joint.keys is keys and joint.versions == versions
        if joint is None or not same or len(versions) < len(own):
            maps = self._join_maps(keys[:, :, self.past_heads])
            joint = self.joint = _JointMaps(keys, versions, *maps)
        of_queries = joint.phi_q, q, position
        of_keys = Mapped(joint.phi_k, k, position - max(self.config.window - 1, 0))
        return self.windowed(q, k, v, Mapped(*of_queries), of_keys, LogScale(*of_queries))

    def _join_maps(self, keys: Tensor) -> tuple[Landmarks, Landmarks]:
        """Maps of queries and of keys, which are near to no sink, with sinks ``[1 m g k]``."""
        heads, (m, groups, width) = self.attention.heads, keys.shape[1:]
        sinks = upcast(keys[0]).transpose(0, 1) * self.attention.scaling
        of_queries = sinks.repeat_interleave(heads // groups, 0), self._log_mix().expand(heads, m)
        nowhere = sinks.new_zeros(groups, m, width), sinks.new_full((groups, m), -torch.inf)
        return self.phi_q.extend(*of_queries), self.phi_k.extend(*nowhere)

    @property
    def keeps_states(self) -> bool:
        return False

    def from_cache(self, kept: tuple[Tensor, ...], record: Any, past: Past) -> State:
        keys, values, nothing, memory, age = super().from_cache(kept, record, past)
        if isinstance(record.fk, Mapped):
            return keys, values, nothing, memory, age
        # no more of them can leave the window, and the oldest do
        first, (_, count) = at_most(keys.shape[2], record.shape[1]), past
        rank = count[:, None] - age[:, :first]
        with disable_autocast(keys.device):
            mapped = self.phi_k(self.phi_k.unrotate(keys[:, :, :first].transpose(1, 2), rank))
        if self._have_left(count):
            mapped = F.pad(mapped, (0, self.config.sinks))
        else:
            mapped = self.reader.mark(mapped, rank)
        room = (0, 0, 0, keys.shape[2] - first)
        return keys, values, F.pad(mapped.transpose(1, 2), room), memory, age
