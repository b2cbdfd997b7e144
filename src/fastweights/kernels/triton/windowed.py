"""`WindowedLinear` in Triton: many tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.chips import Chip, chip_of
from fastweights.kernels.triton.launch import DEVICES, launch, refuse_missing
from fastweights.kernels.triton.operator import OperatorResult, Streams, TritonOperator
from fastweights.kernels.triton.streams import NARROW, Strided, next_power, side_by_side
from fastweights.kernels.windowed.forward import blockwise_windows
from fastweights.recurrence.mapped import Mapped, ScaledMap, elu_plus_one, features, softmax
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import WindowedLinear, WindowState

WIDEST = 256
"""Keys, values and features of one head."""

WIDEST_MAPPED = 128
"""Keys that features are made of within a kernel; of wider ones torch makes them."""

ACTIVATIONS = {
    softmax: "softmax_features",
    torch.exp: "exponential_features",
    elu_plus_one: "elu_features",
    torch.relu: "relu_features",
    F.relu: "relu_features",
}
"""The f of `Mapped` features that kernels make themselves, and what it is called there."""


class WindowSettings(NamedTuple):
    """What is no tensor: the fields of `WindowedLinear`, how many tokens are cached, what q·k is
    multiplied by; `softcap` 0 stands for none, `activation` counts in `ACTIVATIONS`, -1
    where features are given.
    """

    window: int
    cached: int
    scale: float
    softcap: float
    shared: bool
    activation: int


class Tensors(NamedTuple):
    """The streams of the operator: queries ``[b t h ·]``, keys with the cached ones in front
    ``[b s+t g ·]``, S ``[b g f v+1]``, documents ``[b s+t]`` or None, a ``[b t h 1]`` or None; with
    W fq and fk are what features are made of.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    fq: Tensor
    fk: Tensor
    mix: Tensor
    memory: Tensor
    documents: Tensor | None
    log_scale: Tensor | None
    W_q: Tensor | None
    W_k: Tensor | None


class WindowConfiguration(NamedTuple):
    """How kernels are compiled.

    Attributes:
        chunk: queries at once, and keys
        features: of one part: as many as are read at once
        memory: rows and columns that one program sums up
        warps: of a program for outputs or gradients
    """

    chunk: int
    features: int
    memory: int
    warps: int

    @classmethod
    def of(cls, chip: Chip, kind: torch.dtype, widest: int) -> WindowConfiguration:
        """Products of `kind`, heads at most `widest` wide."""
        hopper = chip.capability >= 90
        if kind == torch.float32:
            return cls(16 if widest > 64 else 32, 32, 32, 4)
        if widest <= 64:
            return cls(64, 64, 64, 4)
        if widest <= 128 and hopper:
            return cls(64, 128, 64, 8)
        return cls(32, 64, 64, 4 if widest <= 128 else 8)


class KernelSizes(NamedTuple):
    """What kernels are compiled for: query and key heads; the widths of keys, values, features and
    parts of features, and how many parts there are; tokens of a chunk, and the widths of tiles; the
    dtype of products.
    """

    HEADS: int
    GROUPS: int
    K: int
    V: int
    F: int
    PART: int
    PARTS: int
    C: int
    BK: int
    BV: int
    BF: int
    KIND: Any


class WindowSizes(NamedTuple):
    """What the kernels of one call share."""

    b: int
    heads: int
    groups: int
    length: int
    cached: int
    window: int
    k: int
    v: int
    f: int
    kind: torch.dtype
    device: torch.device
    configuration: WindowConfiguration

    @classmethod
    def of(cls, settings: WindowSettings, s: Tensors) -> WindowSizes:
        (b, length, groups, k), v, f = s.k.shape, s.v.shape[-1], s.memory.shape[2]
        promoted = torch.promote_types(s.q.dtype, s.v.dtype)
        # float16 has no room for sums over all tokens, nor for their inverse
        kind = torch.bfloat16 if promoted == torch.bfloat16 else torch.float32
        chosen = WindowConfiguration.of(chip_of(s.q.device), kind, max(k, v, f))
        window = min(settings.window, length + 1)
        heads, cached, device = s.q.shape[2], settings.cached, s.q.device
        return cls(b, heads, groups, length, cached, window, k, v, f, kind, device, chosen)

    @property
    def tokens(self) -> int:
        return self.length - self.cached

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.configuration.chunk)

    def for_kernels(self, features: int, values: int, *, made: bool) -> KernelSizes:
        """Of features that are `made` there or given, at most so many at once, and so many values
        by each program.
        """
        parts, keys = FeatureParts.of(self.f, features, made=made), tile_width(self.k)
        widths, heads = (self.k, self.v, self.f, parts.size, parts.count), (self.heads, self.groups)
        tiles = (self.configuration.chunk, keys, values, parts.tile)
        return KernelSizes(*heads, *widths, *tiles, triton_dtype(self.kind))

    def for_memory(self, *, made: bool) -> KernelSizes:
        """The same of kernels that sum up the memory."""
        columns = self.configuration.memory
        return self.for_kernels(columns, columns, made=made)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """As kernels take them."""
        return self.length, self.cached, self.window, self.chunks

    def segments(self, parts: int) -> tuple[int, int]:
        """(chunks per segment, segments) of a walk along the memory: one for each head and part
        of the memory, or as many as occupy the GPU.
        """
        wanted = 2 * chip_of(self.device).multiprocessors
        segments = max(1, min(wanted // (self.b * self.groups * parts), self.chunks // 8))
        per_segment = -(-self.chunks // segments)
        return per_segment, -(-self.chunks // per_segment)


class FeatureParts(NamedTuple):
    """How the features of a head are read: so many parts of a size, by tiles of a width."""

    size: int
    count: int
    tile: int

    @classmethod
    def of(cls, f: int, most: int, *, made: bool) -> FeatureParts:
        """At most so many at once; those that are `made` come in two halves."""
        if made:
            return cls(f // 2, 2, tile_width(f // 2))
        tile = min(tile_width(f), most)
        return cls(tile, -(-f // tile), tile)


def triton_dtype(dtype: torch.dtype) -> Any:
    """As kernels know it."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[dtype]


def tile_width(width: int) -> int:
    """A power of two that products of tiles can have."""
    return max(16, next_power(width))


def attend(settings: WindowSettings, streams: Streams, keep: bool) -> OperatorResult:
    """(o ``[b t h v]``, S behind the last token); for a backward with statistics of the queries,
    and o or both sides' averages.
    """
    from fastweights.kernels.triton.device import windowed as device

    s = Tensors(*streams)  # type: ignore[arg-type]
    sizes = WindowSizes.of(settings, s)
    states, normalisers, last = sum_memory(settings, sizes, s)
    o = s.q.new_empty(
        sizes.b, sizes.tokens, sizes.heads, sizes.v, dtype=torch.promote_types(s.q.dtype, s.v.dtype)
    )
    sides = [torch.empty_like(o) if keep and not settings.shared else None for _ in range(2)]
    statistics, most = None, sizes.configuration.features
    if keep:
        statistics = o.new_empty(sizes.b, sizes.heads, 4, sizes.tokens, dtype=torch.float32)
    launch(
        device.attend,
        (sizes.b * sizes.heads * sizes.chunks,),
        *(Strided.of(x) for x in (s.q, s.k, s.v, s.fq, s.fk, s.mix)),
        *(Strided.or_none(s.log_scale), s.W_q, s.W_k, s.documents, states, normalisers),
        *(Strided.of(o), *map(Strided.or_none, sides), statistics),
        *(settings.scale, settings.softcap or None, *sizes.lengths),
        SHARED=settings.shared,
        sizes=sizes.for_kernels(most, tile_width(sizes.v), made=s.W_q is not None),
        activate=activation(settings.activation),
        num_warps=sizes.configuration.warps,
        num_stages=2,
    )
    saved = () if settings.shared else tuple(sides)
    return OperatorResult((o, last), (statistics, *saved) if keep else ())


def sum_memory(
    settings: WindowSettings, sizes: WindowSizes, s: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """S ``[b·g·chunks f v]`` and z ``[b·g·chunks f]`` before every chunk, and both behind the last
    ``[b g f v+1]``.
    """
    from fastweights.kernels.triton.device import windowed as device

    read = (Strided.of(s.fk), s.W_k, Strided.of(s.v), s.documents, s.memory)
    constants = sizes.for_memory(made=s.W_k is not None)
    arguments = (device.sum_memory, s.memory, read, sizes.lengths, sizes, constants, sizes.chunks)
    return _walk_memory(*arguments, activate=activation(settings.activation))


def _walk_memory(
    kernel: Any,
    memory: Tensor,
    read: Sequence[object],
    lengths: Sequence[int],
    sizes: WindowSizes,
    constants: KernelSizes,
    count: int,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a walk along the memory finds: S ``[b·g·count f v]`` and z ``[b·g·count f]``, and both
    where it ends, of the shape of `memory`. Where time is cut into segments, what each adds is
    summed up first.
    """
    heads, f, v = sizes.b * sizes.groups, sizes.f, sizes.v
    blocks = constants.PARTS * -(-v // constants.BV)
    per_segment, segments = sizes.segments(blocks)
    states = memory.new_empty(heads * count, f, v, dtype=sizes.kind)
    found = states, memory.new_empty(heads * count, f), torch.empty_like(memory)

    def walk(*written: Tensor | None) -> None:
        arguments = (*read, *sums, *written, *lengths, per_segment, segments)
        grid = (heads * segments, blocks)
        launch(kernel, grid, *arguments, sizes=constants, num_warps=4, **options)

    sums: tuple[Tensor | None, ...] = (None, None)
    if segments > 1:
        sums = memory.new_empty(heads * segments, f, v), memory.new_empty(heads * segments, f)
        walk(None, None, None)
    walk(*found)
    return found


def activation(number: int) -> Any:
    """The function of this number among `ACTIVATIONS` as kernels know it; None for -1."""
    from fastweights.kernels.triton.device import windowed as device

    return None if number < 0 else getattr(device, [*ACTIVATIONS.values()][number])


def differentiate(
    settings: WindowSettings,
    streams: Streams,
    saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    """The gradients of the streams, features of which are given, from those of o and S."""
    from fastweights.kernels.triton.device import windowed_backward as device

    s, (o, statistics, *sides) = Tensors(*streams), saved  # type: ignore[arg-type]
    asked = Tensors(*wanted)  # type: ignore[arg-type]
    o, near, far = (o, None, None) if settings.shared else (None, *sides)
    do, dlast = side_by_side(gradients[0]), gradients[1].contiguous()
    sizes = WindowSizes.of(settings, s)
    states, normalisers, _ = sum_memory(settings, sizes, s)
    dq, dfq, dmix = (x.new_empty(x.shape) for x in (s.q, s.fq, s.mix))
    dscale = None if s.log_scale is None else s.log_scale.new_empty(s.log_scale.shape)
    coefficients = s.memory.new_empty(sizes.b, sizes.heads, 5, sizes.tokens)
    most, warps = sizes.configuration.features, sizes.configuration.warps
    constants = sizes.for_kernels(most, tile_width(sizes.v), made=False)
    options: dict[str, Any] = {"sizes": constants, "num_warps": warps, "num_stages": 2}
    launch(
        device.window_query_gradients,
        (sizes.b * sizes.heads * sizes.chunks,),
        *(Strided.of(x) for x in (s.q, s.k, s.v, s.mix)),
        *(s.documents, statistics),
        *(Strided.or_none(x) for x in (o, near, far)),
        *(Strided.of(do), Strided.of(dq), Strided.of(dmix), Strided.or_none(dscale)),
        *(coefficients, settings.scale, settings.softcap or None, *sizes.lengths),
        SHARED=settings.shared,
        **options,
    )
    launch(
        device.memory_query_gradients,
        (sizes.b * sizes.heads * sizes.chunks,),
        *(Strided.of(x) for x in (s.v, s.fk)),
        *(s.documents, states, normalisers, coefficients, Strided.of(do), Strided.of(dfq)),
        *sizes.lengths,
        **options,
    )
    if not (asked.k or asked.v or asked.fk or asked.memory):
        return dq, None, None, dfq, None, dmix, None, None, dscale, None, None
    dstates, dnormalisers, dmemory = sum_memory_gradients(sizes, s, coefficients, do, dlast)
    # the tiles that hold the first and the last key
    c, w = sizes.configuration.chunk, sizes.window
    lowest, highest = (w - 1 - sizes.cached) // c, (sizes.tokens + w - 2) // c
    tiles = highest - lowest + 1
    far_dv, dfk = s.v.new_empty(s.v.shape, dtype=sizes.kind), s.fk.new_empty(s.fk.shape)
    launch(
        device.memory_key_gradients,
        (sizes.b * sizes.groups * tiles,),
        *(Strided.of(x) for x in (s.v, s.fq, s.fk)),
        *(s.documents, coefficients, dstates, dnormalisers),
        *(Strided.of(x) for x in (do, far_dv, dfk)),
        *(*sizes.lengths, lowest, tiles),
        **options,
    )
    if not (asked.k or asked.v):
        return dq, None, None, dfq, dfk, dmix, dmemory, None, dscale, None, None
    dk, dv = s.k.new_empty(s.k.shape), s.v.new_empty(s.v.shape)
    launch(
        device.window_key_gradients,
        (sizes.b * sizes.groups * tiles,),
        *(Strided.of(x) for x in (s.q, s.k, s.v)),
        *(s.documents, statistics, coefficients),
        *(Strided.of(x) for x in (do, far_dv, dk, dv)),
        *(settings.scale, settings.softcap or None, *sizes.lengths, lowest, tiles),
        SHARED=settings.shared,
        ON_SCALE=dscale is not None,
        **options,
    )
    return dq, dk, dv, dfq, dfk, dmix, dmemory, None, dscale, None, None


def sum_memory_gradients(
    sizes: WindowSizes, s: Tensors, coefficients: Tensor, do: Tensor, dlast: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of S ``[b·g·(chunks+1) f v]`` and z ``[b·g·(chunks+1) f]`` before every chunk and
    behind the last, and of the initial memory.
    """
    from fastweights.kernels.triton.device import windowed_backward as device

    read = (Strided.of(s.fq), Strided.of(do), s.documents, coefficients, dlast)
    lengths = (sizes.length, sizes.cached, sizes.chunks)
    constants = sizes.for_memory(made=False)
    kernel, count = device.sum_memory_gradients, sizes.chunks + 1
    return _walk_memory(kernel, s.memory, read, lengths, sizes, constants, count)


def _define(settings: WindowSettings, streams: Streams) -> tuple[Tensor, Tensor]:
    s, count = Tensors(*streams), settings.cached  # type: ignore[arg-type]
    *cached, age = _cached_of(s, count)
    record = WindowedLinear(
        *(s.q, s.k[:, count:], s.v[:, count:], s.fq, s.fk[:, count:], s.mix, settings.window),
        shared=settings.shared,
        softcap=settings.softcap or None,
        log_scale=s.log_scale,
        segment_starts=_starts_of(s.documents, count),
    )
    o, (*_, memory, _) = blockwise_windows(record, (*cached, s.memory, age))  # type: ignore[arg-type]
    return o, memory


def _cached_of(s: Tensors, count: int) -> list[Tensor]:
    """Cached keys, values and features ``[b g s ·]``, and their ages ``[b s]``."""
    age = torch.arange(count, 0, -1, device=s.k.device).expand(len(s.k), -1)
    if s.documents is not None:
        age = torch.where(s.documents[:, :count] < 0, FORGOTTEN, age)
    return [*(x[:, :count].transpose(1, 2) for x in (s.k, s.v, s.fk)), age]


def _starts_of(documents: Tensor | None, count: int) -> Tensor | None:
    """Where documents begin, ``[b t 1 1]``."""
    if documents is None:
        return None
    return (F.pad(documents[:, count:], (1, 0)).diff(dim=1) != 0)[..., None, None]


WINDOW = TritonOperator(
    "window", WindowSettings, Tensors._fields, 2, attend, differentiate, _define, reread=1
)


class LearnedMap(NamedTuple):
    """Features that kernels make: W ``[h·f/2 k 1]`` of queries and of keys, and f among
    `ACTIVATIONS`.
    """

    W_q: Tensor
    W_k: Tensor
    activation: int

    @classmethod
    def of(cls, recurrence: WindowedLinear) -> LearnedMap | None:
        """None where features are given, are of a map that kernels do not know, or are learnt."""
        fq, fk = recurrence.fq, recurrence.fk
        if not (isinstance(fq, Mapped) and isinstance(fk, Mapped)):
            return None
        known, f, k = [*ACTIVATIONS], fq.map.activate, recurrence.q.shape[-1]
        if isinstance(fq.map, ScaledMap):
            return None
        if torch.is_grad_enabled() and requires_grad(recurrence):
            return None
        if f not in known or fk.map.activate is not f or k > WIDEST_MAPPED:
            return None
        heads = zip((fq, fk), (recurrence.shape[2], recurrence.groups), strict=True)
        if any(m.map.W.shape != (h * m.map.size // 2, k, 1) for m, h in heads):
            return None
        return cls(fq.map.W.contiguous(), fk.map.W.contiguous(), known.index(f))


class Cache(NamedTuple):
    """What the queries see: keys, values and features (or what those are made of) ``[b s+t g ·]``,
    the cached ones in front, and the documents ``[b s+t]``, -1 where a token was forgotten; None:
    all tokens are of one.
    """

    k: Tensor
    v: Tensor
    fk: Tensor
    documents: Tensor | None

    @classmethod
    def of(
        cls, recurrence: WindowedLinear, own: Tensor, cached: Sequence[Tensor], age: Tensor
    ) -> Cache:
        """`own` are the record's features; `cached` keys, values and features ``[b g s ·]``."""
        (b, t, _), g, starts = recurrence.shape, recurrence.groups, recurrence.segment_starts
        streams = (s.expand(b, t, g, -1) for s in (recurrence.k, recurrence.v, own))
        k, v, fk = (_append(old, new) for old, new in zip(cached, streams, strict=True))
        if starts is None and not age.shape[1]:
            return cls(k, v, fk, None)
        begun = age.new_zeros(b, t) if starts is None else starts[..., 0, 0].expand(b, t).cumsum(1)
        known = torch.where(age < FORGOTTEN, 0, -1)
        return cls(k, v, fk, torch.cat([known, begun], 1).int())

    def newest(self, count: int) -> tuple[list[Tensor], Tensor]:
        """The last `count` keys, values and features ``[b g count ·]`` and their ages; those of
        other documents than the last token's are zeros, and forgotten.
        """
        b, length = self.k.shape[:2]
        rows = slice(length - count, length)
        age = torch.arange(count, 0, -1, device=self.k.device).expand(b, -1)
        kept = [s[:, rows].transpose(1, 2) for s in (self.k, self.v, self.fk)]
        if self.documents is None:
            return [s.contiguous() for s in kept], age.contiguous()
        there = self.documents[:, rows] == self.documents[:, -1:]
        kept = [(s * there[:, None, :, None]).contiguous() for s in kept]
        return kept, torch.where(there, age, FORGOTTEN)


def _append(cached: Tensor, own: Tensor) -> Tensor:
    """``[b g s ·]`` and ``[b t g ·]`` as ``[b s+t g ·]``."""
    if not cached.shape[2]:
        return side_by_side(own)
    return torch.cat([cached.transpose(1, 2), own], 1)


def compute(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    """(o, state)"""
    (b, t, h), (keys, values, kept, memory, age) = recurrence.shape, state
    learned = LearnedMap.of(recurrence)
    if learned is None:
        fq, fk = features(recurrence.fq), features(recurrence.fk)
        cache = Cache.of(
            recurrence, fk, (keys, values, recurrence.cached_features(keys, kept)), age
        )
    else:
        fq, fk = recurrence.fq.stream, recurrence.fk.stream  # type: ignore[union-attr]
        cache = Cache.of(recurrence, fk, (keys, values, keys), age)
    q, fq, mix = (side_by_side(s.expand(b, t, h, -1)) for s in (recurrence.q, fq, recurrence.mix))
    settings = WindowSettings(
        recurrence.window,
        age.shape[1],
        q.shape[-1] ** -0.5,
        recurrence.softcap or 0.0,
        recurrence.shared,
        -1 if learned is None else learned.activation,
    )
    maps = (None, None) if learned is None else learned[:2]
    keys, memory = (cache.k, cache.v), memory.contiguous()
    others = (cache.documents, scale_of(recurrence), *maps)
    o, memory = WINDOW(settings, q, *keys, fq, cache.fk, mix, memory, *others)
    count = min(max(recurrence.window - 1, 0), t + age.shape[1])
    (*ring, kept), age = cache.newest(count)
    ring = [
        s.to(torch.promote_types(old.dtype, s.dtype))
        for s, old in zip((*ring, recurrence.kept_features(kept)), state[:3], strict=True)
    ]
    return o, (*ring, memory, age)  # type: ignore[return-value]


def scale_of(recurrence: WindowedLinear) -> Tensor | None:
    """a ``[b t h 1]``"""
    if recurrence.log_scale is None:
        return None
    return side_by_side(features(recurrence.log_scale).expand(*recurrence.shape, 1))


def requires_grad(recurrence: WindowedLinear) -> bool:
    """Of any stream, or of what features and scales are still to be made of."""
    lazy = (recurrence.fq, recurrence.fk, recurrence.log_scale)
    return any(s is not None and s.requires_grad for s in (*recurrence.streams.values(), *lazy))


def _streams_of(recurrence: WindowedLinear) -> list[Tensor]:
    """All that is read, of features that are still to be made their streams and W."""
    mapped = [s for s in (recurrence.fq, recurrence.fk) if isinstance(s, Mapped)]
    given = [s for s in recurrence.streams.values() if s.dtype != torch.bool]
    return [*given, *(x for s in mapped for x in (s.stream, s.map.W))]


def refuses(recurrence: WindowedLinear) -> str | None:
    """Why these kernels cannot take a record."""
    if recurrence.keep_mask is not None:
        return "its tokens may be padding"
    if any(x.dtype not in NARROW for x in _streams_of(recurrence)):
        return "its streams are not all in float32, bfloat16 or float16"
    widths = {
        "keys": recurrence.q.shape[-1],
        "values": recurrence.values,
        "features": recurrence.fq.shape[-1],
    }
    for name, width in widths.items():
        if width > WIDEST:
            return f"its {name} are {width} wide, more than {WIDEST}"
    return refuse_missing()


TRITON_WINDOW = Kernel(
    "window and linear memory (Triton)", WindowedLinear, compute, refuses, DEVICES, True
)
