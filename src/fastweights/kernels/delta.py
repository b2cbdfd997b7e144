"""`DPLR`, and `Delta` as its tied case, in time blocks that fit the cache, with a hand-written
backward that recomputes inside a block.

Inside a chunk, P(x, y) are the products of queries x with the keys y of tokens up to theirs, each
decayed in between, and M(y) the same of a with the tokens before. S enters a chunk as R and leaves
it as S'; x̃, ỹ are x as it reads R and y as it is left in S'. Where b = w, all that is written under
it is U, which solves a unit lower triangular system:

    (I + M(w)) U = V - ã R                  o = P(q, w) U + q̃ R               S' = R + w̃ᵀ U

Where it is not, U comes under b, less what is erased, beside V under w:

    (I + M(b)) U = -M(w) V - ã R            o = P(q, w) V + P(q, b) U + q̃ R   S' = R + w̃ᵀ V + b̃ᵀ U

The inverse T of the system is taken once per chunk, so that only U = T G - (T ã) R waits for the
chunk before. Decays that are gentle enough are factored: `blocks.Factors` are in the streams, and
R = m ⊙ S, S' is left times m; all others go by `anchors`. Kept for the backward are the streams and
the states at block starts, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.anchors import Anchors
from fastweights.kernels.blocks import (
    BlockPlan,
    Factors,
    decay_into,
    evaluate_in_blocks,
    state_gradient_of_middle,
)
from fastweights.kernels.table import Kernel, refuse_complex
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.dplr import DPLR


class _DeltaTiles(NamedTuple):
    """Streams of n chunks ``[b h n c ·]``, or their gradients."""

    q: Tensor
    w: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None
    log_decay: Tensor | None

    @property
    def key(self) -> Tensor:
        """What U is written under."""
        return self.w if self.b is None else self.b


class _States(NamedTuple):
    """R before and R' after every chunk ``[b h n k v]``, or their gradients."""

    before: Tensor
    after: Tensor


class _Factored(NamedTuple):
    """No decays, or gentle ones: q is q e^(c-μ), w is w e^(μ-c), and m = e^μ. What reads before the
    decay has the factor of the token before.

    Attributes:
        factors: e^(c-μ) and m; None without decays
        erasing: e^(c-μ) of a
        reads, erases, leaves: what q, a and keys are multiplied by as they meet states, ``[b h n c
            k|1]``; None for 1
        carry: what is left of R behind the chunk, ``[b h n k|1 1]``; None for all
        m: what a state enters and leaves a chunk times; None for 1
    """

    factors: Factors | None
    erasing: Tensor | None

    reads = erases = leaves = carry = None

    @classmethod
    def of(cls, log_decay: Tensor | None, before: bool) -> Self:
        if log_decay is None:
            return cls(None, None)
        factors = Factors.of(log_decay)
        if not before:
            return cls(factors, factors.scale)
        start = factors.m.mT.reciprocal()
        return cls(factors, torch.cat([start, factors.scale[..., :-1, :]], -2))

    @property
    def m(self) -> Tensor | None:
        return None if self.factors is None else self.factors.m

    def scale(self, tiles: _DeltaTiles) -> _DeltaTiles:
        """The streams as products are made of them."""
        if self.factors is None:
            return tiles
        up = self.factors.scale
        q, w, v, a, b, log_decay = tiles
        b = None if b is None else b / up
        return _DeltaTiles(q * up, w / up, v, _times(a, self.erasing), b, log_decay)

    def inner(self, q: Tensor, k: Tensor) -> Tensor:
        """P ``[b h n c c]``"""
        return (q @ k.mT).tril_()

    def inner_back(self, q: Tensor, k: Tensor, dinner: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of q and k, from that of P (overwritten)."""
        dinner.tril_()
        return dinner @ k, dinner.mT @ q

    def erased(self, a: Tensor, k: Tensor) -> Tensor:
        """M ``[b h n c c]``"""
        return (a @ k.mT).tril_(-1)

    def erased_back(self, a: Tensor, k: Tensor, derased: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of a and k, from that of M (overwritten)."""
        return self.inner_back(a, k, derased.tril_(-1))

    def back(
        self, tiles: _DeltaTiles, grads: _DeltaTiles, states: _States, dstates: _States
    ) -> _DeltaTiles:
        """The gradients of the streams, from those of `tiles`, which `scale` made."""
        dq, dw, dv, da, db, _ = grads
        if self.factors is None:
            return grads
        up = self.factors.scale
        middle = state_gradient_of_middle(
            states.before, dstates.before, states.after, dstates.after
        )
        dtotal, erased = _total(tiles, grads), tiles.a * da
        if self.erasing is not up:
            # the first token's factor is e^(-μ) alone
            middle -= erased[..., :1, :]
            erased = _up(erased)
        ddecay = self.factors.backward(dtotal.add_(erased), middle)
        db = None if db is None else db / up
        return _DeltaTiles(dq * up, dw / up, dv, _times(da, self.erasing), db, ddecay)


class _Anchored(NamedTuple):
    """Decays at any rate, as `_Factored` has them; what reads before the decay is a query of the
    token before.
    """

    anchors: Anchors
    erases: Tensor
    before: bool

    m = None

    @classmethod
    def of(cls, log_decay: Tensor | None, before: bool) -> Self:
        assert log_decay is not None
        anchors = Anchors.of(log_decay)
        return cls(anchors, _down(anchors.read, 1.0) if before else anchors.read, before)

    @property
    def reads(self) -> Tensor:
        return self.anchors.read

    @property
    def leaves(self) -> Tensor:
        return self.anchors.write

    @property
    def carry(self) -> Tensor:
        return self.anchors.carry

    def scale(self, tiles: _DeltaTiles) -> _DeltaTiles:
        return tiles

    def inner(self, q: Tensor, k: Tensor) -> Tensor:
        return self.anchors.inner(q, k)

    def inner_back(self, q: Tensor, k: Tensor, dinner: Tensor) -> tuple[Tensor, Tensor]:
        return self.anchors.inner_back(q, k, dinner)

    def erased(self, a: Tensor, k: Tensor) -> Tensor:
        if self.before:
            return _down(self.anchors.inner(_up(a), k))
        return self.anchors.inner(a, k).tril_(-1)

    def erased_back(self, a: Tensor, k: Tensor, derased: Tensor) -> tuple[Tensor, Tensor]:
        if not self.before:
            return self.anchors.inner_back(a, k, derased.tril_(-1))
        da, dk = self.anchors.inner_back(_up(a), k, _up(derased))
        return _down(da), dk

    def back(
        self, tiles: _DeltaTiles, grads: _DeltaTiles, states: _States, dstates: _States
    ) -> _DeltaTiles:
        # queries carry e^(c_t), keys e^(-c_s), and S' carries e^(c_last)
        erased = tiles.a * grads.a
        dtotal = _total(tiles, grads).add_(_up(erased) if self.before else erased)
        ddecay = self.anchors.backward(dtotal, (dstates.after * states.after).sum(-1))
        return grads._replace(log_decay=ddecay)


_Decays = _Factored | _Anchored


def _total(tiles: _DeltaTiles, grads: _DeltaTiles) -> Tensor:
    """d c_t from queries, which carry e^(c_t), and keys, which carry e^(-c_t)."""
    total = (tiles.q * grads.q).sub_(tiles.w * grads.w)
    return total if tiles.b is None or grads.b is None else total.sub_(tiles.b * grads.b)


def _up(rows: Tensor) -> Tensor:
    """Every row one token earlier, zeros behind."""
    return F.pad(rows[..., 1:, :], (0, 0, 0, 1))


def _down(rows: Tensor, first: float = 0.0) -> Tensor:
    """Every row one token later, behind a row of `first`."""
    return F.pad(rows[..., :-1, :], (0, 0, 1, 0), value=first)


def _times(stream: Tensor, factor: Tensor | None) -> Tensor:
    return stream if factor is None else stream * factor


def _add(total: Tensor, found: Tensor, factor: Tensor | None, sign: int = 1) -> Tensor:
    """`total`, to which ± found ⊙ factor is added."""
    if factor is None:
        return total.add_(found, alpha=sign)
    return total.addcmul_(found, factor, value=sign)


class _ErasingChunks(NamedTuple):
    """The chunks of a block: streams as products are made of them, T, and M(w) where b is
    another.
    """

    tiles: _DeltaTiles
    decays: _Decays
    inverse: Tensor
    overlap: Tensor | None

    @classmethod
    def of(cls, tiles: _DeltaTiles, decays: _Decays) -> Self:
        tiles = decays.scale(tiles)
        overlap = None if tiles.b is None else decays.erased(tiles.a, tiles.w)
        return cls(tiles, decays, _inverse(decays.erased(tiles.a, tiles.key)), overlap)

    def scan(self, state: Tensor) -> tuple[_States, Tensor, Tensor]:
        """(R and R' of every chunk, U, the state after the last)."""
        tiles, m, carry = self.tiles, self.decays.m, self.decays.carry
        erasing, keys = self._erasing(), _times(tiles.key, self.decays.leaves).mT
        given, beside = tiles.v, None
        if self.overlap is not None:
            given = (self.overlap @ tiles.v).neg_()
            beside = _times(tiles.w, self.decays.leaves).mT @ tiles.v
        written = self.inverse @ given
        before = written.new_empty(*written.shape[:3], *state.shape[-2:])
        after, last = torch.empty_like(before), torch.empty_like(state)
        for n in range(written.shape[2]):
            # R = m ⊙ S;  U = T G - (T ã) R;  R' = carry ⊙ R + Σ k̃ᵀ U;  S' = m ⊙ R'
            decay_into(state, m, n, out=before[:, :, n])
            written[:, :, n] -= erasing[:, :, n] @ before[:, :, n]
            found = keys[:, :, n] @ written[:, :, n]
            if beside is not None:
                found += beside[:, :, n]
            after[:, :, n] = _add(found, before[:, :, n], None if carry is None else carry[:, :, n])
            state = decay_into(after[:, :, n], m, n, out=last)
        return _States(before, after), written, state

    def scan_back(
        self, dwritten: Tensor, dbefore: Tensor, dstate: Tensor
    ) -> tuple[_States, Tensor, Tensor]:
        """(gradients of R and R', of U, of the state before the first), from what o gives of U and
        R.
        """
        m, carry, erasing = self.decays.m, self.decays.carry, self._erasing().mT
        keys = _times(self.tiles.key, self.decays.leaves)
        dafter, first = torch.empty_like(dbefore), torch.empty_like(dstate)
        for n in reversed(range(dbefore.shape[2])):
            # dR' = m ⊙ dS';  dU += k̃ dR';  dR += carry ⊙ dR' - (T ã)ᵀ dU;  dS = m ⊙ dR
            decay_into(dstate, m, n, out=dafter[:, :, n])
            dwritten[:, :, n] += keys[:, :, n] @ dafter[:, :, n]
            dbefore[:, :, n] -= erasing[:, :, n] @ dwritten[:, :, n]
            _add(dbefore[:, :, n], dafter[:, :, n], None if carry is None else carry[:, :, n])
            dstate = decay_into(dbefore[:, :, n], m, n, out=first)
        return _States(dbefore, dafter), dwritten, dstate

    def _erasing(self) -> Tensor:
        return self.inverse @ _times(self.tiles.a, self.decays.erases)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(o ``[b h n c v]``, the state after the block)."""
        tiles, decays = self.tiles, self.decays
        states, written, last = self.scan(state)
        o = decays.inner(tiles.q, tiles.key) @ written
        o += _times(tiles.q, decays.reads) @ states.before
        if tiles.b is not None:
            o += decays.inner(tiles.q, tiles.w) @ tiles.v
        return o, last

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[_DeltaTiles, Tensor]:
        """Tiles of the gradients of all streams, and the gradient of the state before the block."""
        tiles, decays = self.tiles, self.decays
        states, written, _ = self.scan(start)
        # o = P(q, key) U + q̃ R gives of U Pᵀ dO, of R q̃ᵀ dO
        read = decays.inner(tiles.q, tiles.key)
        dbefore = _times(tiles.q, decays.reads).mT @ do
        dstates, dwritten, dstart = self.scan_back(read.mT @ do, dbefore, dstate)
        # of P dO Uᵀ, of q̃ dO Rᵀ; R' = R + k̃ᵀ U gives of k̃ U dR'ᵀ
        dq, dkey = decays.inner_back(tiles.q, tiles.key, do @ written.mT)
        _add(dq, do @ states.before.mT, decays.reads)
        _add(dkey, written @ dstates.after.mT, decays.leaves)
        # (I + M) U = G - ã R gives of G Tᵀ dU, of M and ã that times -Uᵀ and -Rᵀ
        dgiven = self.inverse.mT @ dwritten
        da, dk = decays.erased_back(tiles.a, tiles.key, (dgiven @ written.mT).neg_())
        _add(da, dgiven @ states.before.mT, decays.erases, -1)
        grads = _DeltaTiles(dq, dkey.add_(dk), dgiven, da, None, None)
        if tiles.b is not None:
            grads = self._back_beside(grads, do, dstates.after)
        return decays.back(tiles, grads, states, dstates), dstart

    def _back_beside(self, grads: _DeltaTiles, do: Tensor, dafter: Tensor) -> _DeltaTiles:
        """The gradients with those of V beside U: of w, of v, and more of q and a.

        Args:
            grads: w stands for b, and v for what U solves for
            do: of o
            dafter: of R'
        """
        (q, w, v, a, _, _), decays, dgiven = self.tiles, self.decays, grads.v
        assert self.overlap is not None
        # V is in o as P(q, w) V, in R' as w̃ᵀ V and in G as -M(w) V
        dv = decays.inner(q, w).mT @ do
        dv += _times(w, decays.leaves) @ dafter
        dv -= self.overlap.mT @ dgiven
        dq, dw = decays.inner_back(q, w, do @ v.mT)
        da, dk = decays.erased_back(a, w, (dgiven @ v.mT).neg_())
        _add(dw.add_(dk), v @ dafter.mT, decays.leaves)
        return _DeltaTiles(grads.q.add_(dq), dw, dv, grads.a.add_(da), grads.w, None)


class _DeltaChunks(NamedTuple):
    """`Delta` as the rule with w = b = k, a = βk and βv for v: k, v, β of its chunks, and those."""

    k: Tensor
    v: Tensor
    beta: Tensor
    chunks: _ErasingChunks

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.chunks.forward(state)

    def back(
        self, start: Tensor, do: Tensor, dstate: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        (dq, dw, dv, da, _, ddecay), dstart = self.chunks.back(start, do, dstate)
        # β multiplies v, and k where it erases
        dbeta = (self.v * dv).sum(-1, keepdim=True) + (self.k * da).sum(-1, keepdim=True)
        dk = dw.addcmul_(self.beta, da)
        return (dq, dk, dv.mul_(self.beta), dbeta, ddecay), dstart


DecaysOf = Callable[[Tensor | None, bool], _Decays]
"""Of log decays ``[b h n c ·]``, and whether a reads before them."""


def _dplr_chunks(
    of: DecaysOf, before: bool, plan: BlockPlan, dtype: torch.dtype, *streams: Tensor | None
) -> _ErasingChunks:
    tiles = _DeltaTiles(*(None if s is None else plan.tiles(s, dtype) for s in streams))  # type: ignore[arg-type]
    return _ErasingChunks.of(tiles, of(tiles.log_decay, before))


def _delta_chunks(
    of: DecaysOf, plan: BlockPlan, dtype: torch.dtype, *streams: Tensor | None
) -> _DeltaChunks:
    q, k, v, beta, log_decay = (None if s is None else plan.tiles(s, dtype) for s in streams)
    assert q is not None and k is not None and v is not None and beta is not None  # noqa: PT018
    tiles = _DeltaTiles(q, k, beta * v, beta * k, None, log_decay)
    return _DeltaChunks(k, v, beta, _ErasingChunks.of(tiles, of(log_decay, False)))


def _inverse(system: Tensor) -> Tensor:
    """(I + system)⁻¹ of a system below the diagonal."""
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    return torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)


def chunkwise_delta(recurrence: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Delta`."""
    r = recurrence
    streams = (r.q, r.k, r.v, r.beta, r.log_decay)
    kinds = (partial(_delta_chunks, _Factored.of), partial(_delta_chunks, _Anchored.of))
    o, state = evaluate_in_blocks(Delta, recurrence, streams, state, *kinds)
    return o.to(recurrence.output), state


def chunkwise_dplr(recurrence: DPLR, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `DPLR`."""
    r = recurrence
    streams = (r.q, r.w, r.v, r.a, r.b, r.log_decay)
    kinds = (partial(_dplr_chunks, of, r.before) for of in (_Factored.of, _Anchored.of))
    rule = partial(DPLR, before=r.before)
    o, state = evaluate_in_blocks(rule, recurrence, streams, state, *kinds)
    return o.to(recurrence.output), state


CHUNKED_DELTA = Kernel("blocked delta (torch)", Delta, chunkwise_delta, refuse_complex, opaque=True)
CHUNKED_DPLR = Kernel("blocked DPLR (torch)", DPLR, chunkwise_dplr, refuse_complex, opaque=True)
