"""The structures of the C headers, each described once: what a C function reads, as a record.

A field is a number, a contiguous tensor handed over as a bare address (`Pointer`), a tensor with
its sizes and strides (`View`), or another structure. The test of this file reads the headers and
compares names, order and kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from itertools import accumulate
from struct import Struct
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

View = Annotated[Tensor | None, "View"]
"""``[b t h ·]`` with any strides; None: there is none."""
Pointer = Annotated[Tensor | None, "pointer"]
"""A contiguous tensor of any shape; None: there is none."""

_NO_VIEW = (0, 0, 0, 0, 0, 0)


class Pages(NamedTuple):
    """``Pages`` of problem.h: the number of the page that each sequence's state lies in, and bytes
    from one page to the next; a state is handed over by that of page 0.
    """

    of: Pointer = None
    step: int = 0


IN_A_ROW = Pages()
"""States that lie one behind the other."""


class Forward(NamedTuple):
    """``Forward`` of problem.h: a decay, a rule that erases or a scan, and where its results go."""

    b: int
    t: int
    h: int
    k: int
    v: int
    decays: int
    before: int
    threads: int
    q: View
    key: View
    value: View
    log_decay: View
    beta: View
    erase: View = None
    remove: View = None
    rate: View = None
    o: View = None
    start: Pointer = None
    last: Pointer = None
    marks: Pointer = None
    missing: Pointer = None
    pages: Pages = IN_A_ROW


class Backward(NamedTuple):
    """``Backward`` of problem.h: the same, with gradients."""

    forward: Forward
    d_o: View
    d_q: View
    d_key: View
    d_value: View
    d_log_decay: View
    d_beta: View
    d_erase: View
    d_remove: View
    d_rate: View
    d_last: Pointer
    d_start: Pointer


class MesaProblem(NamedTuple):
    """``MesaProblem`` of mesa.h: the systems of all tokens, and the reading of their solutions."""

    b: int
    t: int
    h: int
    k: int
    v: int
    steps: int
    tol: float
    threads: int
    right: View
    key: View
    beta: View
    ridge: View
    log_decay: View
    value: View
    x: View
    o: View
    gram: Pointer
    memory: Pointer
    last_gram: Pointer
    last_memory: Pointer
    marks: Pointer
    taken: Pointer


class FeatureKind(IntEnum):
    """The enumeration of windowed.h: features are given, f of φ(x) = (f(x W), f(-x W)), or
    softmax(x W + b)."""

    GIVEN = 0
    SOFTMAX = 1
    EXP = 2
    ELU = 3
    RELU = 4
    LANDMARKS = 5


class WindowProblem(NamedTuple):
    """``WindowProblem`` of windowed.h: softmax in a window and linear attention, of one token or
    many, and how many of one token lie behind it.
    """

    b: int
    t: int
    h: int
    g: int
    k: int
    v: int
    f: int
    window: int
    cached: int
    shared: int
    forgotten: int
    scale: float
    softcap: float
    threads: int
    q: View
    key: View
    value: View
    mix: View
    log_scale: View
    keep: Pointer
    starts: Pointer
    keys: Pointer
    values: Pointer
    age: Pointer
    memory: Pointer
    o: View
    next_keys: Pointer
    next_values: Pointer
    next_age: Pointer
    next_memory: Pointer
    map: int = FeatureKind.GIVEN
    fq: View = None
    fk: View = None
    features: Pointer = None
    next_features: Pointer = None
    W_q: Pointer = None
    W_k: Pointer = None
    b_q: Pointer = None
    b_k: Pointer = None
    turning: Pointer = None
    position: int = 0
    further: int = 0
    pages: Pages = IN_A_ROW
    following: int = 0


class TokenAttentionCall(NamedTuple):
    """``TokenAttentionCall`` of attention.h: one token of softmax attention to a cache."""

    b: int
    h: int
    g: int
    s: int
    k: int
    v: int
    threads: int
    scale: float
    q: View
    keys: View
    values: View
    o: View
    key: Pointer
    value: Pointer
    keep: Pointer
    parts: Pointer


class ConvolutionCall(NamedTuple):
    """``ConvolutionCall`` of convolution.h: a short causal convolution, or its gradients."""

    b: int
    t: int
    d: int
    taps: int
    threads: int
    document: Pointer
    weight: Pointer
    d_weight: Pointer
    tail: View
    x: View
    y: View = None
    d_tail: View = None
    d_x: View = None
    d_y: View = None


class NormCall(NamedTuple):
    """``NormCall`` of norm.h: RMSNorm of rows, or its gradients."""

    rows: int
    width: int
    threads: int
    narrow: int
    epsilon: float
    x: Pointer
    weight: Pointer
    y: Pointer = None
    d_y: Pointer = None
    d_x: Pointer = None
    d_weight: Pointer = None


class RotationCall(NamedTuple):
    """``RotationCall`` of rotation.h: rotary positions of heads."""

    b: int
    t: int
    h: int
    width: int
    threads: int
    x: View
    cosines: View
    sines: View
    y: View


class PointwiseKind(IntEnum):
    """The enumeration of pointwise.h: a + b, silu(a) b, or gelu(a) b."""

    SUM = 0
    SILU_GATED = 1
    GELU_GATED = 2


class PointwiseCall(NamedTuple):
    """``PointwiseCall`` of pointwise.h: what is computed of pairs of numbers."""

    count: int
    kind: int
    a: Pointer
    b: Pointer
    to: Pointer


class Replay(NamedTuple):
    """``Replay`` of replay.h: calls one after the other, ``[count 2]`` addresses of functions and
    of structures.
    """

    count: int
    calls: Pointer


class Counters(NamedTuple):
    """``Counters`` of replay.h: addresses ``[count]`` of numbers, and the most that each can be."""

    count: int
    numbers: Pointer
    most: Pointer


class ProductCall(NamedTuple):
    """``ProductCall`` of product.h: a few rows times a weight, and how many such lie behind it."""

    rows: int
    inputs: int
    outputs: int
    threads: int
    x: Pointer
    weight: Pointer
    bias: Pointer
    y: Pointer
    following: int = 0


class QuantizedProductCall(NamedTuple):
    """``QuantizedProduct`` of quantized.h: a few rows times a weight of bytes, or of half bytes,
    and how many such lie behind it.
    """

    rows: int
    inputs: int
    outputs: int
    threads: int
    x: Pointer
    codes: Pointer
    scale: Pointer
    offset: Pointer
    bias: Pointer
    y: Pointer
    rounded: Pointer
    following: int = 0


class BonusStep(NamedTuple):
    """``BonusStep`` of bonus.h: one token of a bonus with exponential gates."""

    b: int
    h: int
    v: int
    threads: int
    least: float
    empty: float
    q: View
    key: View
    value: View
    log_decay: View
    bonus: View
    log_gain: View
    memory: Pointer
    scale: Pointer
    o: Pointer
    next_memory: Pointer
    next_scale: Pointer


STRUCTURES: tuple[type, ...] = (
    Forward,
    Backward,
    MesaProblem,
    WindowProblem,
    TokenAttentionCall,
    ConvolutionCall,
    NormCall,
    RotationCall,
    PointwiseCall,
    Replay,
    Counters,
    ProductCall,
    QuantizedProductCall,
    BonusStep,
)


def pack(structure: Any) -> bytes:
    """The memory of a structure as C lays it out: every field takes 8 bytes, a view 48."""
    return _struct(type(structure)).pack(*_numbers(structure))


@cache
def field_kinds(structure: type) -> dict[str, Any]:
    """By field: int, float, "pointer", "View", or the structure that lies there."""
    hints = get_type_hints(structure, include_extras=True)
    return {name: getattr(kind, "__metadata__", (kind,))[0] for name, kind in hints.items()}


@cache
def _kinds(structure: type) -> tuple[Any, ...]:
    return tuple(field_kinds(structure).values())


def _numbers(structure: Any) -> list[float]:
    """The fields one after the other, tensors as addresses and strides."""
    numbers = list(structure)
    # from the end, so that what a view or structure takes up does not move what is still to come
    for place, kind in _places(type(structure)):
        value = numbers[place]
        if kind == "pointer":
            numbers[place] = 0 if value is None else value.data_ptr()
        else:
            numbers[place : place + 1] = view(value) if kind == "View" else _numbers(value)
    return numbers


@cache
def _places(structure: type) -> tuple[tuple[int, Any], ...]:
    """Where the fields that are no numbers stand, and their kinds; the last first."""
    kinds = enumerate(_kinds(structure))
    return tuple(reversed([(place, kind) for place, kind in kinds if kind not in (int, float)]))


@cache
def offsets(structure: type) -> dict[str, int]:
    """By field: where it begins in the memory of the structure, in bytes."""
    kinds = field_kinds(structure)
    sizes = [Struct("".join(_codes_of(kind))).size for kind in kinds.values()]
    return dict(zip(kinds, accumulate(sizes, initial=0), strict=False))


def size(structure: type) -> int:
    """Of its memory, in bytes."""
    return _struct(structure).size


@cache
def _struct(structure: type) -> Struct:
    return Struct("".join(_codes(structure)))


def _codes(structure: type) -> Iterator[str]:
    """Letters of the module `struct` for the fields."""
    for kind in _kinds(structure):
        yield from _codes_of(kind)


def _codes_of(kind: Any) -> Iterator[str]:
    """Those of one field."""
    if kind is float:
        yield "d"
    elif kind == "View":
        yield "6q"
    elif kind is int or kind == "pointer":
        yield "q"
    else:
        yield from _codes(kind)


def view(tensor: Tensor | None) -> tuple[int, int, int, int, int, int]:
    """``View`` of problem.h: the address, the strides in numbers (floats or bfloat16), and whether
    they are bfloat16; axes of length 1 broadcast.
    """
    if tensor is None:
        return _NO_VIEW
    (b, t, h, _), (by_b, by_t, by_h, by_w) = tensor.shape, tensor.stride()
    dtype = tensor.dtype
    n = 2 if dtype.is_complex else 1
    return (
        tensor.data_ptr(),
        n * by_b if b > 1 else 0,
        n * by_t if t > 1 else 0,
        n * by_h if h > 1 else 0,
        n * by_w,
        dtype is torch.bfloat16,
    )
