"""Softmax attention by torch's fused kernels, and of one token by attention.c."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.growing import CachePart, append, drop_oldest, extend, extend_at
from fastweights.kernels.native import abi, library
from fastweights.kernels.rehearsal import rehearsed
from fastweights.kernels.table import Kernel
from fastweights.recurrence.cached import Cache
from fastweights.recurrence.softmax import Softmax, attend
from fastweights.recurrence.streams import heads_first
from fastweights.recurrence.timeline import FORGOTTEN

SPAN = "fw_attended_tokens"
"""The number of tokens that a task reads, by its name in C."""

_LENGTH_AT, _THREADS_AT, _KEYS_AT, _VALUES_AT = (
    abi.offsets(abi.TokenAttentionCall)[name] // 8 for name in ("s", "threads", "keys", "values")
)
"""Which numbers of the structure C reads them from; a view begins with its address."""

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
    # blocks are sequences of their own, with the keys of two blocks, which hold any window
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
    (b, g, r, _), (s, width) = q.shape, values.shape[2:]
    o, parts = q.new_empty(b, g, r, width), _parts(b * g * r, s, width)
    keep = None if seen is None else seen.reshape(b, s).to(torch.uint8)
    problem = _problem(q.contiguous(), keys, values, o, parts)
    library.call("fw_attend", problem._replace(keep=keep))
    return o


def _parts(queries: int, s: int, width: int) -> Tensor:
    """Room for the sums of spans of s tokens."""
    return torch.empty(queries, -(-s // library.read_constant(SPAN)), width + 2)


def _problem(
    q: Tensor, keys: Tensor, values: Tensor, o: Tensor, parts: Tensor
) -> abi.TokenAttentionCall:
    """What C is given: of q and o ``[b g r ·]``, keys and values ``[b g s ·]``."""
    (b, g, r, width), (s, values_width) = q.shape, values.shape[2:]
    sizes = b, g * r, g, s, width, values_width, _threads(keys, values)
    read, left = (x.view(b, 1, g * r, -1) for x in (q, o))
    cache = keys.transpose(1, 2), values.transpose(1, 2)
    return abi.TokenAttentionCall(*sizes, width**-0.5, read, *cache, left, None, None, None, parts)


def _threads(keys: Tensor, values: Tensor) -> int:
    return library.threads(keys.numel() + values.numel())


class CacheReader:
    """Reads one token of softmax attention after the other, by a call that is packed once for the
    room in which keys and values lie.

    Args:
        q: ``[b g r k]``, where the token's queries will be
        key: ``[b g 1 k]``, where its keys will be
        value: ``[b g 1 v]``, where its values will be
        o: ``[b g r v]``, where what it reads belongs
        scale: what scores are multiplied by; None: 1/√k
    """

    def __init__(
        self, q: Tensor, key: Tensor, value: Tensor, o: Tensor, scale: float | None = None
    ) -> None:
        self._q, self._key, self._value, self._o = q, key, value, o
        self._scale = q.shape[-1] ** -0.5 if scale is None else scale
        self._rooms: tuple[Tensor, ...] = ()
        self._last: tuple[tuple[Tensor, CachePart], ...] = ()

    def read(self, keys: Tensor, values: Tensor, gone: int = 0) -> tuple[Tensor, Tensor]:
        """`attend_to_cache` of caches with the token behind them, which are returned without the
        `gone` oldest; those that were returned last go on where they lie."""
        longer = self._extend(keys), self._extend(values)
        read = longer[0].seen(), longer[1].seen()
        if not self._lie_in(longer):
            self._pack(longer, read)
        numbers = self._numbers
        numbers[_LENGTH_AT], numbers[_THREADS_AT] = read[0].shape[2], _threads(*read)
        numbers[_KEYS_AT], numbers[_VALUES_AT] = (part.data_ptr() for part in read)
        self._call()
        if gone:
            longer = longer[0].without(gone), longer[1].without(gone)
            read = longer[0].seen(), longer[1].seen()
        self._last = tuple(zip(read, longer, strict=True))
        return read

    def _extend(self, cache: Tensor) -> CachePart:
        known = next((part for last, part in self._last if last is cache), None)
        return extend(cache, 1) if known is None else extend_at(known, cache, 1)

    def _lie_in(self, parts: Sequence[CachePart]) -> bool:
        """Whether the call is packed for the rooms of these."""
        rooms = (part.room.whole for part in parts)
        return bool(self._rooms) and all(map(is_, self._rooms, rooms))

    def _pack(self, lying: tuple[CachePart, CachePart], after: tuple[Tensor, Tensor]) -> None:
        (b, g, r, _), (keys, values) = self._q.shape, after
        rooms = tuple(part.room.whole for part in lying)
        parts = _parts(b * g * r, max(room.shape[2] for room in rooms), self._o.shape[-1])
        problem = _problem(self._q, keys, values, self._o, parts)
        problem = problem._replace(scale=self._scale, key=self._key, value=self._value)
        self._call = library.PreparedCall("fw_attend", problem, kept=rooms)
        memory: Any = self._call.memory
        self._numbers = np.ndarray((abi.size(abi.TokenAttentionCall) // 8,), np.int64, memory)
        self._rooms = rooms


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
    return o.reshape(b, 1, h, -1), last_window(recurrence.window, keys, values, following)


def _requires_grad(recurrence: Softmax, state: Cache) -> bool:
    streams = (recurrence.q, recurrence.k, recurrence.v, *state)
    return torch.is_grad_enabled() and any(s.requires_grad for s in streams)


def last_window(window: int | None, keys: Tensor, values: Tensor, age: Tensor) -> Cache:
    """What the next token can still see of a cache, oldest first, of which at most the front is
    forgotten.
    """
    gone = 0 if window is None else gone_by(window, age.shape[1])
    return drop_oldest(keys, gone), drop_oldest(values, gone), age[:, gone:]


def gone_by(window: int, tokens: int) -> int:
    """How many of so many tokens, the oldest, the next one does not see."""
    return max(0, tokens - window + 1)


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
