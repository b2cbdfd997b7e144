"""Inner products of keys that decay at any rate, for chunks too steep for `blocks.Factors`.

A chunk is halved again and again. A query of a right half meets a key of the left one through the
boundary between them, its anchor, so that every exponent is a sum of log decays and none is above
0; a reset (−inf) is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.blocks import smallest_exponent


class Anchors(NamedTuple):
    """Decays inside chunks ``[… c k|1]``.

    Attributes:
        queries, keys: per level, e^(log decay from the anchor to t, from s to the anchor) ``[…
            n m k|1]``
        read: from the chunk's start to t: of what queries read from the state
        write: from s to the chunk's end: of what keys leave in the state
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    read: Tensor
    write: Tensor

    @classmethod
    def of(cls, log_decay: Tensor) -> Self:
        prefix, suffix = log_decay.clone(), torch.zeros_like(log_decay)
        queries, keys, m = [], [], 1
        while m < log_decay.shape[-2]:
            before, after = (_halves(s, m) for s in (prefix, suffix))
            left, right = before[..., 0, -1:, :].clone(), before[..., 1, -1:, :].clone()
            queries.append(_exp(before[..., 1, :, :], factors=2))
            keys.append(_exp(after[..., 0, :, :], factors=2))
            # sums of log decays of twice as many tokens
            before[..., 1, :, :] += left
            after[..., 0, :, :] += right
            m *= 2
        return cls(tuple(queries), tuple(keys), _exp(prefix), _exp(suffix))

    @property
    def carry(self) -> Tensor:
        """What is left of the state ``[… k|1 1]``."""
        return self.read[..., -1:, :].mT

    def inner(self, q: Tensor, k: Tensor) -> Tensor:
        """P_ts = Σ_i q_ti exp(Σ_{j=s+1..t} log α_ji) k_si ``[… c c]``, zero above the diagonal."""
        # a token with its own key: nothing decays
        inner = q.new_zeros(*q.shape[:-1], q.shape[-2])
        inner.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        for level, (query, key) in enumerate(zip(self.queries, self.keys, strict=True)):
            # pairs of blocks of m tokens: queries of the right one, decayed from the boundary, with
            # keys of the left one, decayed to it
            m = 1 << level
            right, left = _halves(q, m)[..., 1, :, :] * query, _halves(k, m)[..., 0, :, :] * key
            _cross(inner, m).copy_(
                right @ left.mT if level else (right * left).sum(-1, keepdim=True)
            )
        return inner

    def inner_back(self, q: Tensor, k: Tensor, dinner: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of q and k."""
        # P_tt = q_t·k_t
        own = dinner.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq, dk = own * k, own * q
        for level, (query, key) in enumerate(zip(self.queries, self.keys, strict=True)):
            # P = (q ⊙ query) (k ⊙ key)ᵀ of a pair: dq = (dP (k ⊙ key)) ⊙ query, dk likewise
            m, cross = 1 << level, _cross(dinner, 1 << level)
            right, left = _halves(q, m)[..., 1, :, :] * query, _halves(k, m)[..., 0, :, :] * key
            of_right, of_left = (
                (cross @ left, cross.mT @ right) if level else (cross * left, cross * right)
            )
            _halves(dq, m)[..., 1, :, :] += of_right * query
            _halves(dk, m)[..., 0, :, :] += of_left * key
        return dq, dk

    def backward(self, dtotal: Tensor, dend: Tensor) -> Tensor:
        """d log α from d c, c_t = Σ_{j≤t} log α_j, and from the state after the chunk, that of its
        end (``[… k]``).
        """
        dend = dend.unsqueeze(-2)
        if self.read.shape[-1] == 1:
            dtotal, dend = dtotal.sum(-1, keepdim=True), dend.sum(-1, keepdim=True)
        # every c from t on holds log α_t: a sum over later tokens; so does the chunk's end
        return dtotal.sum(-2, keepdim=True) - dtotal.cumsum(-2) + dtotal + dend


def _halves(stream: Tensor, m: int) -> Tensor:
    """``[… c k]`` → ``[… n 2 m k]``: pairs of neighbouring blocks of m tokens."""
    return stream.unflatten(-2, (-1, 2, m))


def _cross(inner: Tensor, m: int) -> Tensor:
    """``[… c c]`` → ``[… n m m]``: queries of the right with keys of the left one of each pair of
    blocks.
    """
    pairs = inner.unflatten(-1, (-1, 2 * m)).unflatten(-3, (-1, 2 * m)).diagonal(dim1=-4, dim2=-2)
    return pairs[..., m:, :m, :].movedim(-1, -3)


def _exp(log_decay: Tensor, factors: int = 1) -> Tensor:
    """e^x, and 0 where the product of so many of them is no normal number, which would slow matrix
    products down.
    """
    least = smallest_exponent(log_decay.dtype) / factors
    return F.threshold(log_decay.clamp(min=least - 0.5).exp_(), math.exp(least), 0.0, inplace=True)
