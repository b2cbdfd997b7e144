"""`Decay` and `Selective` with a small state per head, in Triton: a scan, real or complex.

A warp follows a few channels (value columns of heads) through time, their state in its registers.
Where they are too few to fill the GPU, time is cut into segments, which are read twice: first for
what each adds to a state, then for good.

Nothing is spelled out that streams share: heads their keys, tokens their decay, all keys of a head
one number times a rate of each. The gradient of what heads share is summed in strips, one per
program and token; that of what is constant in time, inside the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.chips import Chip, chip_of
from fastweights.kernels.triton.launch import DEVICES, launch, refuse_missing
from fastweights.kernels.triton.operator import OperatorResult, Streams, TritonOperator
from fastweights.kernels.triton.streams import NARROW
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.selective import Selective

MOST_KEYS, MOST_ELEMENTS = 64, 4
"""Up to how many keys with one value, and k·v of any but one key, this beats matrix products."""
MOST_COMPLEX_KEYS, MOST_COMPLEX_ELEMENTS = 256, 256
"""The same for complex records, which no kernel of matrix products takes."""
BUSY = 3
"""Programs per multiprocessor, of one warp each, from which on time stays in one piece."""
FULL = 8
"""How many there are to be where it does not."""
LEAST_TILES = 2
"""Of a segment of time."""


class Configuration(NamedTuple):
    """Attributes:
    STEPS: tokens that are read at a time, and between two states kept for the backward
    KEYS: keys that are computed at a time
    LANES: channels of a program
    """

    STEPS: int
    KEYS: int
    LANES: int

    @classmethod
    def of(cls, keys: int, *, is_complex: bool, is_wide: bool) -> Configuration:
        """What fits the registers: `is_wide` says that heads have keys of their own at each token,
        whose addresses take some.
        """
        if keys == 1:
            return cls(8 if is_complex else 16, 1, 32)
        return cls(4 if is_wide else 8, 1 if is_complex else 2, 32)


class ScanNumbers(NamedTuple):
    """A stream ``[b t h ·]`` of real or complex numbers as the kernels read it: its real and
    imaginary parts, and the distances between them, 0 along an axis of length 1.
    """

    data: tuple[Tensor, ...]
    batch: int
    time: int
    head: int
    column: int

    @classmethod
    def of(cls, x: Tensor) -> ScanNumbers:
        parts = torch.view_as_real(x).unbind(-1) if x.is_complex() else (x,)
        strides = zip(parts[0].stride(), x.shape, strict=True)
        return cls(parts, *(stride if length > 1 else 0 for stride, length in strides))

    @classmethod
    def or_none(cls, x: Tensor | None) -> ScanNumbers | None:
        return None if x is None else cls.of(x)


class ScanSettings(NamedTuple):
    """Attributes:
    exact: whether o stays in float32 for what is added to it; else it has the dtype of q and v
    """

    exact: bool


class ScanProblem(NamedTuple):
    """Streams as the operator has them: v ``[b t h v]`` and all others of its batch and heads, or
    shared as the kernels read them.

    Attributes:
        q: ``[b t h k]``; ``[b t 1 k]`` shared by heads; ``[#b 1 #h k]`` constant in time
        k: the same, or None for the tied key
        v: ``[b t h v]``
        log_decay: ``[b t h 1]``, ``[b t h k]``, or ``[#b 1 #h k]`` constant in time
        rate: of the keys, ``[1 1 h k]``, by which a log_decay ``[b t h 1]`` is multiplied
    """

    q: Tensor
    k: Tensor | None
    v: Tensor
    log_decay: Tensor
    rate: Tensor | None

    @property
    def keys(self) -> int:
        return self.q.shape[-1]

    @property
    def channels(self) -> int:
        return self.v.shape[2] * self.v.shape[3]

    @property
    def is_complex(self) -> bool:
        return any(s is not None and s.is_complex() for s in self)

    @property
    def configuration(self) -> Configuration:
        streams = [s for s in (self.q, self.k) if s is not None and not self.is_constant(s)]
        return Configuration.of(
            self.keys,
            is_complex=self.is_complex,
            is_wide=not all(map(self.is_shared, streams)),
        )

    def is_constant(self, stream: Tensor | None) -> bool:
        return stream is not None and stream.shape[1] < self.v.shape[1]

    def is_shared(self, keys: Tensor | None) -> bool:
        """Whether all heads read the same q or k, another at each token."""
        if keys is None or self.is_constant(keys):
            return False
        return keys.shape[2] == 1 and self.channels > 1

    @property
    def is_narrow(self) -> bool:
        return self.log_decay.shape[-1] == 1 and not self.is_constant(self.log_decay)

    def numbers(self, stream: Tensor | None) -> tuple[ScanNumbers | None, ScanNumbers | None]:
        """A stream as one of every token, or as one that is constant in time."""
        found = ScanNumbers.or_none(stream)
        return (None, found) if self.is_constant(stream) else (found, None)

    def key_numbers(self, keys: Tensor | None) -> tuple[ScanNumbers | None, ScanNumbers | None]:
        """The same of q or k; what heads share lies in rows ``[b t k]``."""
        if keys is not None and self.is_shared(keys):
            keys = keys.contiguous()
        return self.numbers(keys)

    @property
    def decay_numbers(self) -> tuple[ScanNumbers | None, ScanNumbers | None]:
        """log α of every token, or α where it is constant in time."""
        if not self.is_constant(self.log_decay):
            return self.numbers(self.log_decay)
        exact = torch.promote_types(self.log_decay.dtype, torch.float32)
        return self.numbers(self.log_decay.to(exact).exp())

    @property
    def inputs(self) -> tuple[ScanNumbers | None, ...]:
        """What the kernels read, in their order."""
        return (
            *self.key_numbers(self.q),
            *self.key_numbers(self.k),
            ScanNumbers.of(self.v),
            *self.decay_numbers,
            ScanNumbers.or_none(self.rate),
        )

    def empty_states(self, count: int) -> tuple[Tensor, ...]:
        """``[count k channels]``, their real and imaginary parts."""
        shape = (count, self.keys, self.channels)
        return tuple(self.v.new_empty(shape, dtype=torch.float32) for _ in range(self._parts))

    @property
    def _parts(self) -> int:
        return 2 if self.is_complex else 1


class Cut(NamedTuple):
    """How a problem is laid over the GPU: time in `segments` of `span` tokens each."""

    b: int
    t: int
    channels: int
    blocks: int
    span: int
    segments: int

    @classmethod
    def of(cls, problem: ScanProblem, chip: Chip) -> Cut:
        b, t, channels = problem.v.shape[0], problem.v.shape[1], problem.channels
        steps, _, lanes = problem.configuration
        blocks, tiles = -(-channels // lanes), -(-t // steps)
        programs, segments = max(b * blocks, 1), 1
        if programs < BUSY * chip.multiprocessors:
            segments = min(-(-FULL * chip.multiprocessors // programs), tiles // LEAST_TILES)
        per_segment = -(-tiles // max(segments, 1))
        return cls(
            b, t, channels, blocks, per_segment * steps, max(-(-tiles // max(per_segment, 1)), 1)
        )

    @property
    def grid(self) -> tuple[int]:
        return (self.b * self.blocks * self.segments,)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        return self.t, self.channels, self.span, self.segments


def summarize(
    problem: ScanProblem, cut: Cut, keys: Tensor | None, values: Tensor, *, reverse: bool
) -> tuple[tuple[Tensor, ...], ...] | None:
    """(What every segment leaves of a state, what it adds to it); None where there is one."""
    from fastweights.kernels.triton.device import scan as device

    if cut.segments == 1:
        return None
    summaries = tuple(problem.empty_states(cut.b * cut.segments) for _ in range(2))
    launch(
        device.summarize,
        cut.grid,
        *problem.key_numbers(keys),
        ScanNumbers.of(values),
        *problem.decay_numbers,
        ScanNumbers.or_none(problem.rate),
        summaries,
        *cut.lengths,
        V=problem.v.shape[-1],
        K=problem.keys,
        **problem.configuration._asdict(),
        SHARED_K=problem.is_shared(keys),
        NARROW=problem.is_narrow,
        REVERSE=reverse,
        num_warps=1,
    )
    return summaries


def forward(settings: ScanSettings, streams: Streams, keep: bool) -> OperatorResult:
    """(o ``[b t h v]``, the state after the last token) of the streams and the state before."""
    from fastweights.kernels.triton.device import scan as device

    problem, start = ScanProblem(*streams[:5]), streams[5]  # type: ignore[arg-type]
    assert start is not None
    cut = Cut.of(problem, chip_of(start.device))
    carry = problem.empty_states(cut.b * cut.segments)
    marks = problem.empty_states(cut.b * -(-cut.t // problem.configuration.STEPS)) if keep else ()
    dtype = torch.promote_types(problem.q.dtype, problem.v.dtype)
    if settings.exact or problem.is_complex:
        dtype = start.dtype
    o = problem.v.new_empty(problem.v.shape, dtype=dtype)
    summaries = summarize(problem, cut, problem.k, problem.v, reverse=False)
    launch(
        device.scan_forward,
        cut.grid,
        *problem.inputs,
        planes_of(start),
        summaries,
        ScanNumbers.of(o),
        carry,
        marks or None,
        *cut.lengths,
        **_constants(problem),
        num_warps=1,
    )
    return OperatorResult((o, state_of(carry, cut.segments - 1, start)), marks)


def backward(
    _settings: ScanSettings,
    streams: Streams,
    saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    from fastweights.kernels.triton.device import scan as device

    problem, (do, dlast) = ScanProblem(*streams[:5]), gradients  # type: ignore[arg-type]
    cut = Cut.of(problem, chip_of(do.device))
    carry = problem.empty_states(cut.b * cut.segments)
    summaries = summarize(problem, cut, problem.q, do, reverse=True)
    rooms = {
        name: _room(problem, cut, name) if want else None
        for name, want in zip(ScanProblem._fields, wanted, strict=False)
    }
    launch(
        device.scan_backward,
        cut.grid,
        *problem.inputs,
        ScanNumbers.of(do),
        planes_of(dlast),
        summaries,
        saved,
        carry,
        *_written(rooms["q"]),
        *_written(rooms["k"]),
        _written(rooms["v"])[0],
        *_written(rooms["log_decay"]),
        rooms["rate"],
        *cut.lengths,
        **_constants(problem),
        num_warps=1,
    )
    found = [None if room is None else _gather(problem, name, room) for name, room in rooms.items()]
    return *found, state_of(carry, 0, dlast)


def _constants(problem: ScanProblem) -> dict[str, Any]:
    return dict(
        V=problem.v.shape[-1],
        K=problem.keys,
        **problem.configuration._asdict(),
        SHARED_Q=problem.is_shared(problem.q),
        SHARED_K=problem.is_shared(problem.k),
        NARROW=problem.is_narrow,
    )


def planes_of(state: Tensor) -> tuple[Tensor, ...]:
    """``[b h k v]`` as the kernels read states: ``[b k channels]``, real and imaginary parts."""
    parts = torch.view_as_real(state.resolve_conj()).unbind(-1) if state.is_complex() else (state,)
    return tuple(part.transpose(1, 2).flatten(2).contiguous() for part in parts)


def state_of(planes: tuple[Tensor, ...], segment: int, like: Tensor) -> Tensor:
    """``[b h k v]``: of every sequence the state that a segment left."""
    b, h, k, v = like.shape
    parts = [part.unflatten(0, (b, -1))[:, segment].view(b, k, h, v) for part in planes]
    state = parts[0] if len(parts) == 1 else torch.complex(*parts)
    return state.transpose(1, 2).contiguous()


KEYS = ("q", "k")
"""The streams that heads may share."""
Room = Tensor | tuple[Tensor, ...]
"""Where a program writes its part of a gradient: ``[b t channels ·]``, or ``[b blocks t ·]`` of
what heads share; the planes ``[b·segments k channels]`` of what is constant in time.
"""


def _room(problem: ScanProblem, cut: Cut, name: str) -> Room | None:
    stream: Tensor | None = getattr(problem, name)
    if stream is None:
        return None
    if name == "v":
        return stream.new_empty(cut.b, cut.t, cut.channels, 1)
    if name == "rate" or problem.is_constant(stream):
        shape = (cut.b * cut.segments, problem.keys, cut.channels)
        parts = 2 if stream.is_complex() else 1
        return tuple(stream.new_zeros(shape, dtype=torch.float32) for _ in range(parts))
    exact = torch.complex64 if stream.is_complex() else torch.float32
    if name in KEYS and problem.is_shared(stream):
        return stream.new_empty(cut.b, cut.blocks, cut.t, problem.keys, dtype=exact)
    alone = problem.v.shape[-1] == 1
    shape = (cut.b, cut.t, cut.channels, stream.shape[-1])
    return stream.new_empty(shape, dtype=stream.dtype if alone else exact)


def _written(room: Room | None) -> tuple[ScanNumbers | None, tuple[Tensor, ...] | None]:
    """As the kernel has it: for every token, or for what is constant in time."""
    return (None, room) if isinstance(room, tuple) else (ScanNumbers.or_none(room), None)


def _gather(problem: ScanProblem, name: str, room: Room) -> Tensor:
    """The gradient of a stream: its parts added up, in a fixed order."""
    stream: Tensor = getattr(problem, name)
    h, v = problem.v.shape[2:]
    if isinstance(room, tuple):
        planes = room[0] if len(room) == 1 else torch.complex(*room)
        # [b segments k h v] → [b 1 h k]
        sums = planes.unflatten(0, (len(problem.v), -1)).unflatten(3, (h, v)).sum((1, 4))
        return sums.mT[:, None].sum_to_size(stream.shape).to(stream.dtype)
    if name == "v":
        return room.view(stream.shape)
    if name in KEYS and problem.is_shared(stream):
        return room.sum(1)[:, :, None].to(stream.dtype)
    return (room if v == 1 else room.unflatten(2, (h, v)).sum(3)).to(stream.dtype)


def _define(settings: ScanSettings, streams: Streams) -> tuple[Tensor, Any]:
    *of_record, rate, start = streams
    q, k, v, log_decay = of_record
    assert start is not None
    assert log_decay is not None
    if rate is not None:
        log_decay = Selective(q, k, v, log_decay, rate).plain.log_decay  # type: ignore[arg-type]
    o, last = chunk_loop(Decay(q, k, v, log_decay), start)  # type: ignore[arg-type]
    return o.to(start.dtype) if settings.exact else o, last


SCAN = TritonOperator(
    "scan",
    ScanSettings,
    ("q", "k", "v", "log_decay", "rate", "start"),
    2,
    forward,
    backward,
    _define,
)


def scan(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state)."""
    log_decay = recurrence.log_decay
    if log_decay is None:
        log_decay = torch.zeros(1, 1, 1, 1, device=recurrence.device)
    if log_decay.shape[1] < len(recurrence):
        log_decay = log_decay.expand(-1, -1, -1, recurrence.q.shape[-1])
    o, state = _scan(recurrence, log_decay, None, state, exact=recurrence.skip is not None)
    return recurrence.add_skip(o), state


def selective_scan(recurrence: Selective, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state), without writing the decay out."""
    b, t, h = recurrence.shape
    log_decay = recurrence.log_decay.expand(b, t, h, -1)
    return _scan(recurrence, log_decay, recurrence.rate, state, exact=False)


def _scan(
    recurrence: Decay | Selective,
    log_decay: Tensor,
    rate: Tensor | None,
    state: Tensor,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    b, t, h = recurrence.shape
    q, k = recurrence.q, recurrence.k
    if k is None and log_decay.shape[1] < t:
        k = -torch.expm1(log_decay)
    o, state = SCAN(
        ScanSettings(exact),
        _over_time(q, b, t, q.shape[2]),
        None if k is None else _over_time(k, b, t, k.shape[2]),
        _values(recurrence).expand(b, t, h, -1),
        _over_time(log_decay, b, t, h),
        rate,
        state,
    )
    return o, state


def _over_time(stream: Tensor, b: int, t: int, h: int) -> Tensor:
    """Spelled out, for autograd to sum the gradients, unless it is constant in time."""
    stream = stream.resolve_conj()
    return stream if stream.shape[1] < t else stream.expand(b, t, h, -1)


def _values(recurrence: Decay | Selective) -> Tensor:
    """v, complex where nothing else would make the state so."""
    k, v, log_decay = recurrence.k, recurrence.v, recurrence.log_decay
    writes = [s.is_complex() for s in (k, v, log_decay) if s is not None]
    if recurrence.accumulator.is_complex and not any(writes):
        return v.to(recurrence.accumulator)
    return v.resolve_conj()


def _refuses(recurrence: Decay | Selective) -> str | None:
    keys, values = recurrence.q.shape[-1], recurrence.values
    for name, stream in recurrence.streams.items():
        if stream.dtype not in (*NARROW, torch.complex64):
            return f"its {name} is {stream.dtype}"
    if recurrence.accumulator.is_complex:
        most_keys, most_elements = MOST_COMPLEX_KEYS, MOST_COMPLEX_ELEMENTS
        if recurrence.k is None:
            return "its tied key is complex"
    else:
        most_keys, most_elements = MOST_KEYS, MOST_ELEMENTS
    if keys * values == 0:
        return "its states are empty"
    if values == 1 and keys > most_keys:
        return f"its keys are {keys} wide, more than {most_keys}"
    if 1 not in (keys, values) and keys * values > most_elements:
        return f"its states have {keys}·{values} elements per head, more than {most_elements}"
    return refuse_missing()


def _refuses_selective(recurrence: Selective) -> str | None:
    if recurrence.accumulator.is_complex:
        return "its streams are complex"
    if recurrence.rate.shape[1] > 1:
        return "its rates are other ones at every token"
    return _refuses(recurrence)


SCAN_KERNEL = Kernel("scan (Triton)", Decay, scan, _refuses, DEVICES, True)
SELECTIVE_SCAN_KERNEL = Kernel(
    "selective scan (Triton)", Selective, selective_scan, _refuses_selective, DEVICES, True
)
