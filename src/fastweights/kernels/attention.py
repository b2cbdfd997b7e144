"""Softmax attention by torch's fused kernels, and of one token by attention.c."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.growing import append, drop_oldest
from fastweights.kernels.native import abi, library
from fastweights.kernels.rehearsal import rehearsed
from fastweights.kernels.table import Kernel
from fastweights.recurrence.cached import Cache
from fastweights.recurrence.softmax import Softmax, attend
from fastweights.recurrence.streams import heads_first
from fastweights.recurrence.timeline import FORGOTTEN

SPAN = "fw_attended_tokens"
"""The number of tokens that a task reads, by its name in C."""

SMALLEST_BLOCK = 64
"""Queries per block, unless the window is wider."""


def torch_attention(recurrence: Softmax, state: Cache) -> tuple[Tensor, Cache]:
    """(o, cache), all tokens at once."""
    return recurrence.chunk(state)


def sliding_window_attention(recurrence: Softmax, state: Cache) -> tuple[Tensor, Cache]:
    """(o, cache), block by block: each sees itself and the cache of the window before it."""
    assert recurrence.window is not None
    block = _block(recurrence.window)
    masked = recurrence.keep_mask is not None or recurrence.segment_starts is not None
    if not (masked or recurrence.biased or state[0].shape[2]):
        return _all_blocks(recurrence, block), recurrence[-recurrence.window :].advance_cache(state)
    return chunk_loop(recurrence, state, block)  # type: ignore[return-value]


def _all_blocks(recurrence: Softmax, block: int) -> Tensor:
    """o ``[b t h v]`` where every token counts: blocks beside each other, each with the block
    before it as keys.
    """
    b, t, h = recurrence.shape
    n = -(-t // block)
    q, k, v = (
        F.pad(
            s.to(recurrence.output).expand(b, t, -1, -1), (0, 0, 0, 0, 0, n * block - t)
        ).unflatten(1, (n, block))
        for s in (recurrence.q, recurrence.k, recurrence.v)
    )
    queries = q.expand(-1, -1, -1, h, -1).flatten(0, 1).transpose(1, 2)
    keys, values = (
        torch.cat([_block_before(s), s], 2).flatten(0, 1).transpose(1, 2) for s in (k, v)
    )
    mask = (
        _band(recurrence.window or 1, n, block, k.device)
        .expand(b, -1, -1, -1)
        .flatten(0, 1)[:, None]
    )
    o = attend(queries, keys, values, mask, grouped=True)
    return o.transpose(1, 2).unflatten(0, (b, n)).flatten(1, 2)[:, :t]


def _block_before(x: Tensor) -> Tensor:
    """``[b n c g ·]`` one block later; zeros before the first"""
    return F.pad(x, (0, 0, 0, 0, 0, 0, 1, -1))


def _band(window: int, n: int, block: int, device: torch.device) -> Tensor:
    """``[n c 2c]``: which keys of the block before and its own each query sees; there are none
    before the first.
    """
    ours, keys = (
        torch.arange(block, 2 * block, device=device)[:, None],
        torch.arange(2 * block, device=device),
    )
    seen = (keys <= ours) & (keys > ours - window)
    first = torch.arange(n, device=device)[:, None, None] == 0
    return seen & ~(first & (keys < block))


def _block(window: int) -> int:
    return max(window, SMALLEST_BLOCK)


def refuses_window(recurrence: Softmax) -> str | None:
    if recurrence.window is None:
        return "its queries see all tokens: it has no window"
    block = _block(recurrence.window)
    if len(recurrence) <= 2 * block:
        return f"its {len(recurrence)} tokens are no more than two blocks of {block}"
    return None


def attend_to_cache(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """softmax(q kᵀ/√k) v of one token's queries.

    Args:
        q: ``[b g r k]``, r query heads of each key head
        keys: ``[b g s k]``, as `append` returns them
        values: ``[b g s v]``
        seen: ``[b 1 1 s]``, bool, which tokens are read; None for all

    Returns:
        ``[b g r v]``
    """
    (b, g, r, width), (s, values_width) = q.shape, values.shape[2:]
    spans = -(-s // library.read_constant(SPAN))
    o, parts = q.new_empty(b, g, r, values_width), q.new_empty(b, g * r, spans, values_width + 2)
    sizes = b, g * r, g, s, width, values_width, library.threads(keys.numel() + values.numel())
    read, left = (x.view(b, 1, g * r, -1) for x in (q.contiguous(), o))
    cache = keys.transpose(1, 2), values.transpose(1, 2)
    keep = None if seen is None else seen.reshape(b, s).to(torch.uint8)
    problem = abi.TokenAttentionCall(*sizes, width**-0.5, read, *cache, left, keep, parts)
    library.call("fw_attend", problem)
    return o


def attend_token(recurrence: Softmax, state: Cache) -> tuple[Tensor, Cache]:
    """`attend_token_by` torch's fused attention."""
    return attend_token_by(F.scaled_dot_product_attention, recurrence, state)


def attend_token_natively(recurrence: Softmax, state: Cache) -> tuple[Tensor, Cache]:
    """`attend_token_by` attention.c."""
    return attend_token_by(attend_to_cache, recurrence, state)


def attend_token_by(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    recurrence: Softmax,
    state: Cache,
) -> tuple[Tensor, Cache]:
    """(o, cache) of one token: a group's queries stand beside each other, so that they read its
    keys as they lie in the cache, which grows where it is.
    """
    (b, _, h), (keys, values, age), dtype = recurrence.shape, state, recurrence.output
    span = FORGOTTEN // 2 if recurrence.window is None else recurrence.window
    remembered = not age.numel() or int(age.max()) < span
    if not remembered and recurrence.window is not None:
        return recurrence.step(state)
    if not keys.dtype == values.dtype == dtype or _requires_grad(recurrence, state):
        return recurrence.step(state)
    keys, values = (
        append(cache, heads_first(s, dtype).expand(b, cache.shape[1], 1, -1))
        for cache, s in ((keys, recurrence.k), (values, recurrence.v))
    )
    following, mask = F.pad(age + 1, (0, 1), value=1), None
    if not remembered:
        following = torch.where(following < span, following, FORGOTTEN)
        mask = (following < FORGOTTEN)[:, None, None]
    q = recurrence.q.to(dtype).expand(b, 1, h, -1).reshape(b, keys.shape[1], -1, keys.shape[3])
    o = attention(q, keys, values, mask)
    return o.reshape(b, 1, h, -1), _last_window(recurrence, keys, values, following)


def _requires_grad(recurrence: Softmax, state: Cache) -> bool:
    streams = (recurrence.q, recurrence.k, recurrence.v, *state)
    return torch.is_grad_enabled() and any(s.requires_grad for s in streams)


def _last_window(recurrence: Softmax, keys: Tensor, values: Tensor, age: Tensor) -> Cache:
    """What the next token can still see of a cache in which nothing is forgotten."""
    if recurrence.window is None:
        return keys, values, age
    gone = max(0, age.shape[1] - recurrence.window + 1)
    return drop_oldest(keys, gone), drop_oldest(values, gone), age[:, gone:]


def _refuses_bias(recurrence: Softmax) -> str | None:
    return "its scores have a decay or sinks" if recurrence.biased else None


def _refuses_token(recurrence: Softmax) -> str | None:
    if recurrence.biased:
        return _refuses_bias(recurrence)
    if len(recurrence) != 1:
        return f"it has {len(recurrence)} tokens, not one"
    if recurrence.keep_mask is not None or recurrence.segment_starts is not None:
        return "its token may be padding or begin a document"
    if torch.compiler.is_compiling() or rehearsed():
        return "a compiled graph, or a rehearsal, has no numbers to look at"
    streams = (recurrence.q, recurrence.k, recurrence.v)
    if any(type(s) is not Tensor for s in streams):
        return f"a stream is a {type(streams[0]).__name__}"
    return None


def _refuses_native_token(recurrence: Softmax) -> str | None:
    streams = (recurrence.q, recurrence.k, recurrence.v)
    return _refuses_token(recurrence) or library.refuse_tensors(*streams)


NATIVE_TOKEN_ATTENTION = Kernel(
    "attention, one token (compiled)",
    Softmax,
    attend_token_natively,
    _refuses_native_token,
    ("cpu",),
    True,
)
TOKEN_ATTENTION = Kernel(
    "attention, one token (torch)", Softmax, attend_token, _refuses_token, ("cpu",), True
)
WINDOWED_ATTENTION = Kernel(
    "windowed attention, block by block (torch)", Softmax, sliding_window_attention, refuses_window
)
FUSED_ATTENTION = Kernel("fused attention (torch)", Softmax, torch_attention, _refuses_bias)
