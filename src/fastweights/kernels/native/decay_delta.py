"""`Decay`, `Delta` and `DPLR` through the compiled extension: matrix.c, and scan.c where a head
holds a single value, as those of `Selective` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty
from fastweights.kernels.pages import InPages
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.derivatives import differentiable_by
from fastweights.recurrence.dplr import DPLR
from fastweights.recurrence.selective import Selective

Matrix = Decay | Delta | DPLR | Selective


class CFunctions(NamedTuple):
    """The two C functions of a kernel, and how they are asked.

    Attributes:
        forward, backward: their names
        checkpoint_interval: the constant that says how many tokens lie between two states which the
            first keeps for the second
        scans: whether heads hold single values
        before: whether what is erased is read before the state decays
    """

    forward: str
    backward: str
    checkpoint_interval: str
    scans: bool = False
    before: bool = False


MATRIX = CFunctions("fw_forward", "fw_backward", "fw_matrix_marks")
UNDECAYED = MATRIX._replace(before=True)
SCAN = CFunctions("fw_scan_forward", "fw_scan_backward", "fw_scan_marks", scans=True)
COMPLEX = CFunctions("fw_complex_forward", "fw_complex_backward", "fw_scan_marks", scans=True)
CPU = ("cpu",)
WIDEST = "fw_widest_scan"
"""The constant that says how many keys of a head a scan takes."""


def scan_of(dtype: torch.dtype) -> CFunctions:
    """The scan for streams and states of this dtype."""
    return COMPLEX if dtype.is_complex else SCAN


class Streams(NamedTuple):
    """Streams, all complex64, or each float32 or, for matrix.c, bfloat16.

    k is None for the tied key, `erase` but for `DPLR`, `remove` where what is erased is erased
    along k, and `rate` but for `Selective`. C reads an axis of length 1 with a stride of 0.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None = None
    erase: Tensor | None = None
    remove: Tensor | None = None
    rate: Tensor | None = None

    @classmethod
    def of(cls, code: CFunctions, recurrence: Matrix) -> Streams:
        named = recurrence.streams
        key = "w" if "w" in named else "k"
        streams = map(named.get, ("q", key, "v", "log_decay", "beta", "a", "b", "rate"))
        dtype, narrow = recurrence.accumulator, () if code.scans else (torch.bfloat16,)
        return cls(
            *(s if s is None or s.dtype in narrow else _plain(s, dtype) for s in streams)  # type: ignore[arg-type]
        )

    def record(self, code: CFunctions) -> Matrix:
        """The rule of these streams, with keys apart if it erases."""
        q, k, v, log_decay, beta, erase, remove, rate = self
        if k is not None and erase is not None:
            return DPLR(q, k, v, erase, remove, log_decay, code.before)
        if k is not None and beta is not None:
            return Delta(q, k, v, beta, log_decay)
        if k is not None and rate is not None and log_decay is not None:
            return Selective(q, k, v, log_decay, rate)
        return Decay(q, k, v, log_decay)

    @property
    def erases(self) -> bool:
        """Whether the rule erases as well as writes."""
        return self.beta is not None or self.erase is not None

    @property
    def output(self) -> torch.dtype:
        """The dtype of o."""
        return torch.promote_types(self.q.dtype, self.v.dtype)

    def expand_axes(self, b: int, t: int, h: int) -> Streams:
        """Batch, time and heads spelled out, so that autograd sums the gradients."""
        return Streams(*(None if s is None else s.expand(b, t, h, -1) for s in self))  # type: ignore[arg-type]

    def expand_for_scan(self, b: int, t: int, h: int, *, sharing: bool) -> Streams:
        """The same, but q, k and what says the decay of keys, log_decay or the rate that it has,
        may stay constant in time, and q and k shared by heads.
        """
        q, k, _, log_decay, *_, rate = self.own()
        q, k = (
            None if s is None else s.expand(b, -1, s.shape[2] if sharing else h, -1) for s in (q, k)
        )
        assert log_decay is not None
        if rate is not None:
            log_decay, rate = log_decay.expand(b, t, h, -1), rate.expand(b, -1, h, -1)
        else:
            log_decay = log_decay.expand(b, -1, h, -1)
        return Streams(q, k, self.v.expand(b, t, h, -1), log_decay, rate=rate)  # type: ignore[arg-type]

    def own(self) -> Streams:
        """Strides of 0 tell C that heads or tokens share their gradient too: they do only along an
        axis of length 1.
        """
        q, k, v, log_decay, *rest, rate = self
        return Streams(_own(q), _own(k), v, _own(log_decay), *rest, _own(rate))  # type: ignore[arg-type]

    def problem(self, code: CFunctions, t: int, states: Sequence[int]) -> abi.Forward:
        """Sizes and streams, without results, for states of this shape."""
        b, h, k, v = states
        decays = 0 if self.log_decay is None else self.log_decay.shape[-1]
        threads = library.threads(b * t * h * k * v)
        return abi.Forward(b, t, h, k, v, decays, code.before, threads, *self)


def _plain(stream: Tensor, dtype: torch.dtype) -> Tensor:
    """As C reads it: in `dtype`, and in memory as it is."""
    if stream.dtype != dtype:
        stream = stream.to(dtype)
    return stream.resolve_conj() if dtype.is_complex else stream


def _own(stream: Tensor | None) -> Tensor | None:
    if stream is None or all(stream.stride(axis) for axis in (1, 2) if stream.shape[axis] > 1):
        return stream
    return stream.contiguous()


class SavedForBackward(NamedTuple):
    """What the backward needs beside the streams: some states, and what a rule that erases found
    missing or, with keys apart, erased.
    """

    marks: Tensor
    missing: Tensor | None

    @staticmethod
    def shapes(
        code: CFunctions, streams: Streams, start: Tensor
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Of the two; None for what is not there."""
        b, t, h, v = streams.v.shape
        marks = (-(-t // library.read_constant(code.checkpoint_interval)), *start.shape)
        return marks, (b, h, t, v) if streams.erases else None

    @classmethod
    def empty(cls, code: CFunctions, streams: Streams, start: Tensor) -> SavedForBackward:
        marks, missing = cls.shapes(code, streams, start)
        return cls(empty(*marks, dtype=start.dtype), None if missing is None else empty(*missing))


def compute_forward(
    code: CFunctions, streams: Streams, t: int, start: Tensor, kept: SavedForBackward | None
) -> tuple[Tensor, Tensor]:
    """(o, last state)"""
    b, h, k, v = start.shape
    o, last = empty(b, t, h, v, dtype=streams.output), empty(b, h, k, v, dtype=start.dtype)
    marks, missing = kept or (None, None)
    problem = streams.problem(code, t, start.shape)
    library.call(
        code.forward,
        problem._replace(o=o, start=start, last=last, marks=marks, missing=missing),
    )
    return o, last


def _by_chunks(code: CFunctions, start: Tensor, *streams: Tensor | None) -> tuple[Tensor, State]:
    return chunk_loop(Streams(*streams).record(code), start)  # type: ignore[arg-type]


class _Native(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of S_0 ``[b h k v]`` and the streams."""

    @staticmethod
    def forward(
        ctx: Any, code: CFunctions, start: Tensor, *streams: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = Streams(*streams)  # type: ignore[arg-type]
        kept = SavedForBackward.empty(code, given, start)
        o, last = compute_forward(code, given, given.v.shape[1], start, kept)
        ctx.code = code
        ctx.save_for_backward(start, *given, *kept)
        return o, last

    @staticmethod
    @differentiable_by(lambda ctx: (_by_chunks, (ctx.code, *ctx.saved_tensors[:-2])))
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, *given, marks, missing = ctx.saved_tensors
        kept, d_last = SavedForBackward(marks, missing), gradients[1].contiguous()
        wanted = ctx.needs_input_grad[2:]
        d_start, grads = compute_backward(
            ctx.code, Streams(*given), wanted, kept, gradients[0], d_last
        )
        return None, d_start, *grads


def compute_backward(
    code: CFunctions,
    streams: Streams,
    wanted: Sequence[bool],
    kept: SavedForBackward,
    d_o: Tensor,
    d_last: Tensor,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the state before the record, and of those streams where they are wanted;
    matrix.c finds all.
    """
    d_o, d_last = d_o.resolve_conj(), d_last.resolve_conj()
    problem = streams.problem(code, d_o.shape[1], d_last.shape)
    problem = problem._replace(marks=kept.marks, missing=kept.missing)
    grads = [
        (
            None
            if s is None or not (want or not code.scans)
            else _gradient(s, d_last.shape[1], problem)
        )
        for s, want in zip(streams, wanted, strict=True)
    ]
    d_start = empty(*d_last.shape, dtype=d_last.dtype)
    library.call(code.backward, abi.Backward(problem, d_o, *grads, d_last=d_last, d_start=d_start))
    return d_start, [_sum_over_heads(g, s) for g, s in zip(grads, streams, strict=True)]


def _gradient(stream: Tensor, h: int, problem: abi.Forward) -> Tensor:
    """``[b t h ·]``, or ``[b t strips ·]`` partial sums for a stream that the heads share."""
    b, t, heads, width = stream.shape
    if heads == h:
        return empty(b, t, h, width, dtype=stream.dtype)
    return empty(library.ask("fw_scan_strips", problem), b, t, width, dtype=stream.dtype).permute(
        1, 2, 0, 3
    )


def _sum_over_heads(gradient: Tensor | None, stream: Tensor | None) -> Tensor | None:
    if gradient is None or stream is None or gradient.shape == stream.shape:
        return gradient
    return gradient.sum(2, keepdim=True)


def _run(code: CFunctions, recurrence: Matrix, state: Tensor) -> tuple[Tensor, Tensor]:
    streams, state = Streams.of(code, recurrence), _plain(state, state.dtype).contiguous()
    if torch.compiler.is_compiling():
        return torch.ops.fastweights.native(
            code.scans, code.before, state, *_expand_for(code, recurrence, streams)
        )[:2]
    if torch.is_grad_enabled() and any(
        s is not None and s.requires_grad for s in (state, *streams)
    ):
        return _Native.apply(code, state, *_expand_for(code, recurrence, streams))  # type: ignore[return-value]
    return compute_forward(code, streams, len(recurrence), state, None)


def _expand_for(code: CFunctions, recurrence: Matrix, streams: Streams) -> Streams:
    if not code.scans:
        return streams.expand_axes(*recurrence.shape)
    return streams.expand_for_scan(*recurrence.shape, sharing=recurrence.q.shape[-1] > 1)


def _run_matrix(recurrence: Matrix, state: Tensor) -> tuple[Tensor, Tensor]:
    o, last = _run(_matrix_code(recurrence), recurrence, state)
    return recurrence.add_skip(o), last


def _matrix_code(recurrence: Matrix) -> CFunctions:
    return UNDECAYED if recurrence.reads_undecayed else MATRIX


def _run_scan(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    fits = _fits_scan(recurrence)
    o, last = (
        _run(scan_of(state.dtype), recurrence, state) if fits else _run_parts(recurrence, state)
    )
    return recurrence.add_skip(o), last


def _fits_scan(recurrence: Decay) -> bool:
    """Whether C takes all values and keys at once."""
    return recurrence.values == 1 and recurrence.q.shape[-1] <= library.read_constant(WIDEST)


def _run_parts(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, last state) by one value and as many keys as C takes at a time: outputs of keys
    add up.
    """
    plain, widest = replace(recurrence, skip=None), library.read_constant(WIDEST)
    over_keys = {n: s.split(widest, -1) for n, s in plain.streams.items() if n != "v"}
    outputs, states = [], []
    for v, column in zip(plain.v.split(1, -1), state.split(1, -1), strict=True):
        parts = zip(*over_keys.values(), column.split(widest, 2), strict=True)
        found = [
            _run(
                scan_of(state.dtype),
                replace(plain, v=v, **dict(zip(over_keys, streams, strict=True))),
                start,
            )
            for *streams, start in parts
        ]
        outputs.append(torch.stack([o for o, _ in found]).sum(0))
        states.append(torch.cat([last for _, last in found], 2))
    return torch.cat(outputs, -1), torch.cat(states, -1)


def _run_selective(recurrence: Selective, state: Tensor) -> tuple[Tensor, Tensor]:
    o, last = _run(SCAN, recurrence, state)
    return recurrence.add_skip(o), last


def refuses(
    recurrence: Recurrence, numbers: Sequence[torch.dtype] = (torch.float32,)
) -> str | None:
    """Why C takes no streams like these, of which it takes `numbers`; None if it does."""
    if recurrence.accumulator not in numbers:
        return (
            f"its streams are {recurrence.accumulator}, not {' or '.join(map(str, numbers))} or"
            " narrower"
        )
    return library.refuse_missing()


def _refuses_decay(recurrence: Decay) -> str | None:
    if recurrence.q.shape[-1] == 1 and recurrence.values == 2 and len(recurrence) > 1:
        return "its states are two numbers per head, for which matrix products do not pay"
    return refuses(recurrence)


def _refuses_scan(recurrence: Decay) -> str | None:
    width, values = recurrence.q.shape[-1], recurrence.values
    if width * values == 0:
        return "its states are empty"
    if values > 1 and not recurrence.accumulator.is_complex:
        return f"its heads hold {values} real values, not one"
    if recurrence.log_decay is None or recurrence.log_decay.shape[-1] != width:
        return "not every key has a decay of its own"
    refusal = refuses(recurrence, (torch.float32, torch.complex64))
    if refusal or _fits_scan(recurrence):
        return refusal
    if not recurrence.accumulator.is_complex:
        return f"its real keys are {width} wide, more than {library.read_constant(WIDEST)}"
    return (
        "it is one token, of which torch takes all values and keys at once"
        if len(recurrence) == 1
        else None
    )


def _refuses_selective(recurrence: Selective) -> str | None:
    width, values = recurrence.q.shape[-1], recurrence.values
    if values != 1:
        return f"its heads hold {values} values, not one"
    if width < 2:
        return f"its keys are {width} wide: without a sum over keys, decays are not larger than Δ"
    refusal = refuses(recurrence)
    if refusal or width <= (widest := library.read_constant(WIDEST)):
        return refusal
    return f"its keys are {width} wide, more than {widest}"


def _run_in_pages(record: InPages) -> Tensor:
    rule: Any = record.recurrence
    code, state = _code_in_pages(rule), record.state
    assert code is not None
    assert isinstance(state, Tensor)
    streams, (b, t, _) = Streams.of(code, rule), rule.shape
    shape = (b, *state.shape[1:])
    o = empty(b, t, shape[1], shape[3], dtype=streams.output)
    places = {"start": state, "last": state, "pages": abi.Pages(record.pages, record.step)}
    library.call(code.forward, streams.problem(code, t, shape)._replace(o=o, **places))
    return rule.add_skip(o)


def _code_in_pages(rule: Recurrence) -> CFunctions | None:
    """The functions for a rule; None where C takes none like it, or its states in parts."""
    codes = (
        (kernel.refuses(rule), code) for kernel, code in _WHOLE if isinstance(rule, kernel.rule)
    )
    return next((code(rule) for refusal, code in codes if refusal is None), None)


def _scan_code(recurrence: Decay) -> CFunctions | None:
    return scan_of(recurrence.accumulator) if _fits_scan(recurrence) else None


def _refuses_in_pages(record: InPages) -> str | None:
    rule, state = record.recurrence, record.state
    if record.begins:
        return "its sequences begin, and it reads states"
    if _code_in_pages(rule) is None:
        return "its rule is none that C reads and writes as a whole"
    if not isinstance(state, Tensor) or state.dtype != rule.accumulator:
        return f"its states are not of {rule.accumulator}, which is what it sums in"
    return record.scattered()


NATIVE_SCAN = Kernel("scan (compiled)", Decay, _run_scan, _refuses_scan, CPU, True)
NATIVE_SELECTIVE = Kernel(
    "selective scan (compiled)", Selective, _run_selective, _refuses_selective, CPU, True
)
NATIVE_DECAY = Kernel("decay (compiled)", Decay, _run_matrix, _refuses_decay, CPU, True)
NATIVE_DELTA = Kernel("delta (compiled)", Delta, _run_matrix, refuses, CPU, True)
NATIVE_DPLR = Kernel("DPLR (compiled)", DPLR, _run_matrix, refuses, CPU, True)
_WHOLE: list[tuple[Kernel, Callable[[Any], CFunctions | None]]] = [
    (NATIVE_SCAN, _scan_code),
    (NATIVE_DECAY, _matrix_code),
    (NATIVE_SELECTIVE, lambda _: SCAN),
    (NATIVE_DELTA, _matrix_code),
    (NATIVE_DPLR, _matrix_code),
]
"""How C reads and writes the states of a record that a kernel takes."""
NATIVE_IN_PAGES = Kernel(
    "matrices and scans in pages (compiled)", InPages, _run_in_pages, _refuses_in_pages, CPU, True
)
