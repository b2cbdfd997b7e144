"""Inner products of decaying keys: the one piece of algebra that every chunk form shares.

Everything here is heads first: ``[b h t k]`` streams, the chunk's tokens on the last axis but one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

RESET_LOG_DECAY = -1e4
"""A log decay that is an exact reset in every dtype; it stands for −inf where complex arithmetic
makes that NaN.
"""


class Products(NamedTuple):
    """What a chunk of t tokens needs of its queries, keys and decays log α.

    Attributes:
        inner: ``[… t s]``  P_ts = Σ_i q_ti exp(Σ_{j=s+1..t} log α_ji) k_si for s ≤ t, zero
            above the diagonal
        query: ``[… t k]``  q_t exp(Σ_{j≤t} log α_j): reads the state before the chunk
        key: ``[… t k]``  k_s exp(Σ_{j>s} log α_j): what token s leaves in the state after the
            chunk
        carry: ``[… k 1]``  exp(Σ_j log α_j): what is left of the state before the chunk; None
            without decay
    """

    inner: Tensor
    query: Tensor
    key: Tensor
    carry: Tensor | None

    def advance(self, state: Tensor, values: Tensor) -> Tensor:
        """The state after the chunk, from the one before it and the values ``[… t v]`` written in
        it.
        """
        kept = state if self.carry is None else self.carry * state
        return kept + self.key.mT @ values


def decay_products(q: Tensor, k: Tensor, log_decay: Tensor | None) -> Products:
    """`Products` of ``q, k [… t k]`` and ``log_decay [… t 1|k]``, exact for every decay, resets
    (−inf) included.
    """
    if log_decay is None:
        return Products((q @ k.mT).tril(), q, k, None)
    log_decay = _bounded(log_decay)
    if log_decay.shape[-1] == k.shape[-1]:
        inner, prefix, suffix, carry = _halving(q, k, log_decay)
    else:
        one = torch.ones_like(log_decay)
        inner, prefix, suffix, carry = _halving(one, one, log_decay)
        inner = (q @ k.mT) * inner
    return Products(inner, q * prefix.exp(), k * suffix.exp(), carry.exp().mT)


def multiply_decays(log_decay: Tensor) -> Tensor:
    """The product ``[… k 1]`` of decays whose logs are ``[… t k]``; −inf gives 0."""
    return _bounded(log_decay).sum(-2, keepdim=True).exp().mT


def _bounded(log_decay: Tensor) -> Tensor:
    """The same with a number for −inf where arithmetic is complex."""
    if not log_decay.is_complex():
        return log_decay
    return torch.complex(log_decay.real.clamp(min=RESET_LOG_DECAY), log_decay.imag)


def _halving(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(P, log decay from the start to t, from s to the end, of the whole chunk).

    MetaLA eq. 16-18 writes the map as (Q ⊙ A)(K / A)ᵀ, which overflows. Here neighbouring blocks of
    tokens are merged until one is left; a query of the right block meets a key of the left one
    through the boundary between them, so that only sums of log decays, never differences, are
    exponentiated, and each of them is ≤ 0.
    """
    # blocks [… n size k] of one token each, their number a power of two; padding decays nothing
    t = log_decay.shape[-2]
    padding = (0, 0, 0, (1 << max(t - 1, 0).bit_length()) - t)
    q, k, prefix = (F.pad(s, padding).unsqueeze(-2) for s in (q, k, log_decay))
    suffix = torch.zeros_like(prefix)
    # a token's own product is not decayed
    inner = q @ k.mT
    inner = inner.expand(*torch.broadcast_shapes(inner.shape[:-2], prefix.shape[:-2]), 1, 1)
    while prefix.shape[-3] > 1:
        (q_left, q), (k, k_right) = _neighbours(q), _neighbours(k)
        (before, prefix), (suffix, after) = _neighbours(prefix), _neighbours(suffix)
        # right queries, decayed back to the boundary, with left keys, decayed up to it
        cross = (q * prefix.exp()) @ (k * suffix.exp()).mT
        # [[left, 0], [cross, right]]: no query sees a later block
        left, right = _neighbours(inner)
        inner = torch.cat(
            [torch.cat([left, torch.zeros_like(cross)], -1), torch.cat([cross, right], -1)], -2
        )
        # a left key decays over the right block as well, a right query over the left one
        suffix = torch.cat([suffix + prefix[..., -1:, :], after], -2)
        prefix = torch.cat([before, prefix + before[..., -1:, :]], -2)
        q, k = torch.cat([q_left, q], -2), torch.cat([k, k_right], -2)
    prefix, suffix = prefix.squeeze(-3), suffix.squeeze(-3)
    return (
        inner.squeeze(-3)[..., :t, :t],
        prefix[..., :t, :],
        suffix[..., :t, :],
        prefix[..., -1:, :],
    )


def _neighbours(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd ones of the blocks ``[… n t k]``."""
    even, odd = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return even, odd
