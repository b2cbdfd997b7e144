"""Every recurrence in every variant, with how to draw its streams and the oracle it must agree
with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fastweights.methods import Auto, Chunkwise, Method, Parallel, Recurrent
from fastweights.recurrence import (
    DPLR,
    TTT,
    Amplified,
    Bonus,
    Chebyshev,
    Cholesky,
    Decay,
    Delta,
    Kalman,
    LogLinear,
    LongConvolution,
    Mesa,
    Normalized,
    Preconditioned,
    Recurrence,
    Selective,
    Signed,
    Slots,
    Softmax,
    WindowedLinear,
)
from oracles import deltas, kalman, loglinear, rules, slots, ttt

Streams = dict[str, Tensor]
State = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Shape:
    b: int = 2
    t: int = 19
    h: int = 2
    k: int = 3
    v: int = 5

    @property
    def groups(self) -> int:
        return max(self.h // 2, 1) if self.h % 2 == 0 else self.h


Draw = Callable[[Shape, Generator], Tensor]


def normal(*size: int, generator: Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=generator, dtype=dtype)


def keys(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, s.k, generator=g)


def complex_keys(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, s.k, generator=g, dtype=torch.complex128)


def unit_keys(s: Shape, g: Generator) -> Tensor:
    return F.normalize(keys(s, g), dim=-1)


def gated_keys(s: Shape, g: Generator) -> Tensor:
    """Of length below 1."""
    return unit_keys(s, g) * keys(s, g).sigmoid()


def positive_keys(s: Shape, g: Generator) -> Tensor:
    return F.elu(keys(s, g)) + 1


def group_keys(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.groups, s.k, generator=g)


def values(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, s.v, generator=g)


def group_values(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.groups, s.v, generator=g)


def scalar(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, 1, generator=g)


def gate(s: Shape, g: Generator) -> Tensor:
    return scalar(s, g).sigmoid()


def small_gate(s: Shape, g: Generator) -> Tensor:
    return 0.3 * gate(s, g)


def doubled_gate(s: Shape, g: Generator) -> Tensor:
    return 2 * gate(s, g)


def log_scalar(s: Shape, g: Generator) -> Tensor:
    return F.logsigmoid(2 * scalar(s, g) + 1)


def log_vector(s: Shape, g: Generator) -> Tensor:
    return F.logsigmoid(2 * keys(s, g) + 1)


def rate(s: Shape, g: Generator) -> Tensor:
    return keys(s, g).exp()


def log_resets(s: Shape, g: Generator) -> Tensor:
    at_random = torch.rand(s.b, s.t, s.h, s.k, generator=g) < 0.2
    return log_vector(s, g).masked_fill(at_random, -torch.inf)


def log_complex(s: Shape, g: Generator) -> Tensor:
    return torch.complex(log_vector(s, g), 3 * keys(s, g))


def gain(s: Shape, g: Generator) -> Tensor:
    return scalar(s, g)


def gain_resets(s: Shape, g: Generator) -> Tensor:
    return gain(s, g).masked_fill(torch.rand(s.b, s.t, s.h, 1, generator=g) < 0.2, -torch.inf)


def complex_values(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, s.v, generator=g, dtype=torch.complex128)


def ridge(s: Shape, g: Generator) -> Tensor:
    return 0.25 + F.softplus(normal(s.h, s.k, generator=g))


def token_ridge(s: Shape, g: Generator) -> Tensor:
    return 0.25 + F.softplus(keys(s, g))


def floors(s: Shape, g: Generator) -> Tensor:
    return 0.5 + gate(s, g)


def matrix(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.h, s.k, s.v, generator=g)


def complex_matrix(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.h, s.k, s.v, generator=g, dtype=torch.complex128)


def positive_matrix(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.h, s.k, s.v + 1, generator=g).abs()


def scaled_matrix(s: Shape, g: Generator) -> tuple[Tensor, Tensor]:
    """The memory divided by e^m, and m."""
    return positive_matrix(s, g), normal(s.b, s.h, 1, generator=g).abs()


def gram_and_matrix(s: Shape, g: Generator) -> tuple[Tensor, Tensor]:
    root = normal(s.b, s.h, s.k, s.k, generator=g)
    return root @ root.mT / s.k, matrix(s, g)


def cache(
    length: int, s: Shape, g: Generator, heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (normal(s.b, heads or s.groups, length, width, generator=g) for width in (s.k, s.v))
    return k, v, torch.arange(length, 0, -1).expand(s.b, -1).clone()


def curvature_and_matrix(s: Shape, g: Generator) -> tuple[Tensor, Tensor]:
    return normal(s.b, s.h, 1, s.k, generator=g).square(), matrix(s, g)


def decaying_cache(length: int, s: Shape, g: Generator) -> tuple[Tensor, ...]:
    keys, values, age = cache(length, s, g)
    return keys, values, -normal(s.b, s.h, length, 1, generator=g).abs(), age


def log_scalar_resets(s: Shape, g: Generator) -> Tensor:
    at_random = torch.rand(s.b, s.t, s.h, 1, generator=g) < 0.2
    return log_scalar(s, g).masked_fill(at_random, -torch.inf)


def filter_of(length: int) -> Draw:
    return lambda s, g: normal(s.h, length, generator=g)


def full_cache(s: Shape, g: Generator, length: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return cache(length, s, g, heads=s.h)


def as_given(state: State) -> State:
    return state


def multiplied(state: State) -> State:
    """The memory times e^m, which alone says something: how a state is split in the two
    does not.
    """
    memory, m = state
    return memory * m.double().exp()[..., None]


def symmetric(state: State) -> State:
    """Mesa's state with H made symmetric, so that gradients through it do not depend on which half
    was read.
    """
    gram, memory = state
    return (gram + gram.mT) / 2, memory


def features(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, s.k + 1, generator=g).exp()


def group_features(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.groups, s.k + 1, generator=g).exp()


def slot_shares(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, s.k + 1, generator=g).sigmoid()


def log_slots(s: Shape, g: Generator) -> Tensor:
    at_random = torch.rand(s.b, s.t, s.h, s.k + 1, generator=g) < 0.2
    log_decay = F.logsigmoid(2 * normal(s.b, s.t, s.h, s.k + 1, generator=g) + 1)
    return log_decay.masked_fill(at_random, -torch.inf)


def slot_state(s: Shape, g: Generator) -> tuple[Tensor, Tensor]:
    k, v = (normal(s.b, s.h, s.k + 1, width, generator=g) for width in (s.k, s.v))
    return k, v


def level_weights(s: Shape, g: Generator) -> Tensor:
    return normal(s.b, s.t, s.h, 4, generator=g)


def levels_and_count(s: Shape, g: Generator) -> tuple[Tensor, Tensor]:
    """After 8, 12, … tokens, when none of four levels is empty."""
    return normal(s.b, s.h, 4 * s.k, s.v, generator=g), 8 + 4 * torch.arange(s.b)


HIDDEN = (3,)
"""The hidden layers of the network that the rule `TTT` learns here."""


def layers(s: Shape) -> list[tuple[int, int]]:
    """(rows, columns) with the biases, of a network from v channels to v channels."""
    return [(i + 1, o) for i, o in pairwise((s.v, *HIDDEN, s.v))]


def head_weights(s: Shape, g: Generator) -> Tensor:
    return 0.5 * normal(s.h, sum(i * o for i, o in layers(s)), generator=g)


def head_vectors(s: Shape, g: Generator) -> Tensor:
    return normal(s.h, s.v, generator=g)


def network_state(s: Shape, g: Generator) -> tuple[Tensor, ...]:
    """In the middle of minibatches, at another place in every sequence."""
    matrices = [0.3 * normal(s.b, s.h, *size, generator=g) for size in layers(s) * 2]
    return *matrices, 1 + torch.arange(s.b) % 3


def window_state(length: int, s: Shape, g: Generator) -> tuple[Tensor, ...]:
    k, v, age = cache(length, s, g)
    fk = normal(s.b, s.groups, length, s.k + 1, generator=g).exp()
    return k, v, fk, normal(s.b, s.groups, s.k + 1, s.v + 1, generator=g).abs(), age


@dataclass(frozen=True)
class Case:
    """A variant of a rule.

    Attributes:
        rule: from streams to the record
        oracle: from streams (arrays) and ``state=`` to (o, final state, or None where it is not
            compared)
        draws: a stream each; `state` draws the initial state and `adjust` makes a legal one of
            perturbed leaves
        plain: what of a state is compared
    """

    name: str
    rule: Callable[..., Recurrence]
    oracle: Callable[..., Any]
    draws: dict[str, Draw]
    state: Callable[[Shape, Generator], State] = matrix
    adjust: Callable[[State], State] = field(default=as_given)
    plain: Callable[[State], State] = field(default=as_given)

    def streams(
        self, shape: Shape = Shape(), dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> Streams:
        g = Generator().manual_seed(seed)
        return {name: cast(draw(shape, g), dtype) for name, draw in self.draws.items()}

    def start(
        self, shape: Shape = Shape(), dtype: torch.dtype = torch.float64, seed: int = 1
    ) -> State:
        return each(self.state(shape, Generator().manual_seed(seed)), lambda s: cast(s, dtype))

    def __str__(self) -> str:
        return self.name


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float x in `dtype`, a complex one in its complex twin, an integer as it is."""
    if x.is_complex():
        return x.to(dtype.to_complex())
    return x.to(dtype) if x.is_floating_point() else x


def turned(stream: Tensor) -> Tensor:
    """The same numbers with heads before time in memory."""
    return stream.transpose(1, 3).contiguous().transpose(1, 3)


def spread(stream: Tensor) -> Tensor:
    """The same numbers, each beside another."""
    return stream.repeat_interleave(2, -1)[..., ::2]


def parts(state: State) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def each(state: State, f: Callable[[Tensor], Tensor]) -> State:
    return tuple(f(s) for s in state) if isinstance(state, tuple) else f(state)


def normalized_decay(floor: Tensor | float | None = None, **streams: Any) -> Normalized:
    return Normalized(Decay(**{"log_decay": None, **streams}), floor)


def normalized_delta(floor: Tensor | float | None = None, **streams: Any) -> Normalized:
    return Normalized(Delta(**streams), floor)


def amplified_decay(
    log_gain: Tensor,
    log_decay: Tensor | None = None,
    floor: Tensor | float | None = None,
    **streams: Any,
) -> Amplified:
    return Amplified(Normalized(Decay(log_decay=log_decay, **streams), floor), log_gain)


def amplified_bonus(log_gain: Tensor, **streams: Any) -> Amplified:
    return Amplified(Normalized(Bonus(**streams)), log_gain)


def signed(rule: Callable[..., Any]) -> Callable[..., Signed]:
    """`rule` with the signs of its queries' first channel."""
    return lambda **streams: Signed(rule(**streams), streams["q"][..., :1])


def by_levels(rule: Callable[..., Any]) -> Callable[..., LogLinear]:
    return lambda weights, **streams: LogLinear(rule(**streams), weights)


def signed_oracle(oracle: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arrays: oracle(**arrays, sign=arrays["q"][..., :1])


def large_ridge(s: Shape, g: Generator) -> Tensor:
    """Above every eigenvalue that H can have."""
    return 2 * s.t + ridge(s, g)


QKV: dict[str, Draw] = {"q": keys, "k": keys, "v": values}
QV: dict[str, Draw] = {"q": keys, "v": values}
ERASING: dict[str, Draw] = {"q": keys, "k": unit_keys, "v": values, "beta": doubled_gate}
UNTIED: dict[str, Draw] = {"q": keys, "w": keys, "v": values, "a": unit_keys}
APART: dict[str, Draw] = {**UNTIED, "b": gated_keys}
OPTIMAL: dict[str, Draw] = {"q": keys, "k": unit_keys, "v": values, "beta": gate, "ridge": ridge}
POSITIVE: dict[str, Draw] = {"q": positive_keys, "k": positive_keys, "v": values}
GROUPED: dict[str, Draw] = {"q": keys, "k": group_keys, "v": group_values}
WINDOWED: dict[str, Draw] = {**GROUPED, "fq": features, "fk": group_features, "mix": gate}
LEARNING: dict[str, Draw] = {
    "q": values,
    "k": values,
    "v": values,
    "rate": small_gate,
    "scale": gate,
    "start": head_weights,
    "gain": head_vectors,
    "shift": head_vectors,
}
SCALAR: dict[str, Draw] = {"log_decay": log_scalar}
VECTOR: dict[str, Draw] = {"log_decay": log_vector}
RESETS: dict[str, Draw] = {"log_decay": log_resets}
TURNING: dict[str, Draw] = {"log_decay": log_complex}

decay = partial(Decay, k=None, log_decay=None)
dplr = partial(DPLR, b=None)
dplr_before = partial(DPLR, before=True)
before_oracle = partial(rules.dplr, before=True)
mesa = partial(Mesa, log_decay=None)
direct_mesa = partial(Mesa, solver=Cholesky())


def variants(
    rule: Callable[..., Recurrence],
    oracle: Callable[..., Any],
    draws: dict[str, Draw],
    further: dict[str, dict[str, Draw]],
    *others: Any,
    **options: Any,
) -> list[Case]:
    """A case of every name, with `draws` and the streams that stand beside it."""
    return [
        Case(name, rule, oracle, {**draws, **more}, *others, **options)
        for name, more in further.items()
    ]


CASES = [
    *variants(
        decay,
        rules.decay,
        {},
        {
            "decay-none": QKV,
            "decay-scalar": {**QKV, **SCALAR},
            "decay-vector": {**QKV, **VECTOR},
            "decay-tied": {**QV, **VECTOR},
            "decay-resets": {**QKV, **RESETS},
            "decay-tied-resets": {**QV, **RESETS},
            "decay-none-skip": {**QKV, "skip": scalar},
            "decay-scalar-skip": {**QKV, **SCALAR, "skip": scalar},
            "decay-vector-skips": {**QKV, **VECTOR, "skip": values},
        },
    ),
    *variants(
        decay,
        rules.decay,
        {},
        {
            "decay-complex": {"q": complex_keys, "k": complex_keys, "v": values, **TURNING},
            "decay-complex-tied": {**QV, **TURNING},
            "decay-complex-values": {**QKV, "v": complex_values, **TURNING},
        },
        complex_matrix,
    ),
    Case("selective", Selective, rules.selective, {**QKV, **SCALAR, "rate": rate}),
    Case("bonus-scalar", Bonus, rules.bonus, {**QKV, **SCALAR, "bonus": scalar}),
    Case("bonus-vector", Bonus, rules.bonus, {**QKV, **VECTOR, "bonus": scalar}),
    *variants(
        Delta,
        rules.delta,
        ERASING,
        {"delta-none": {}, "delta-scalar": SCALAR, "delta-vector": VECTOR, "delta-resets": RESETS},
    ),
    *variants(
        dplr,
        rules.dplr,
        UNTIED,
        {
            "dplr-none": {"b": gated_keys},
            "dplr-vector": {"b": gated_keys, **VECTOR},
            "dplr-one-key": {"w": gated_keys, **RESETS},
        },
    ),
    *variants(
        dplr_before,
        before_oracle,
        APART,
        {"dplr-before": SCALAR, "dplr-before-resets": RESETS},
    ),
    *variants(
        mesa,
        rules.mesa,
        OPTIMAL,
        {
            "mesa-none": {},
            "mesa-scalar": SCALAR,
            "mesa-ridges": {**SCALAR, "ridge": token_ridge},
        },
        gram_and_matrix,
        symmetric,
    ),
    Case("mesa-direct", direct_mesa, rules.mesa, {**OPTIMAL, **SCALAR}, gram_and_matrix, symmetric),
    Case(
        "kalman",
        partial(Kalman, ratio=0.5, solver=Chebyshev(32)),
        partial(kalman.kalman, ratio=0.5),
        {**QKV, "k": unit_keys, **SCALAR, "mix": gate},
        gram_and_matrix,
        symmetric,
    ),
    *variants(
        partial(Preconditioned, log_decay=None, spread=1.7),
        partial(deltas.preconditioned, spread=1.7),
        {
            **QKV,
            "k": unit_keys,
            "beta": gate,
            "rate": gate,
            "log_fade": log_scalar,
            "center": scalar,
        },
        {"preconditioned-scalar": SCALAR, "preconditioned-vector": VECTOR},
        curvature_and_matrix,
    ),
    Case("signed-decay", signed(Decay), signed_oracle(rules.decay), {**QKV, **VECTOR}),
    Case("signed-delta", signed(Delta), signed_oracle(rules.delta), {**ERASING, **SCALAR}),
    Case("signed-dplr", signed(dplr_before), signed_oracle(before_oracle), {**APART, **SCALAR}),
    *(
        Case(
            name,
            signed(rule),
            signed_oracle(rules.mesa),
            {**OPTIMAL, **SCALAR, "ridge": large_ridge},
            gram_and_matrix,
            symmetric,
        )
        for name, rule in (("signed-mesa", Mesa), ("signed-mesa-direct", direct_mesa))
    ),
    *variants(
        partial(Slots, log_decay=None),
        slots.slots,
        {**QKV, "write": slot_shares},
        {"slots-none": {}, "slots-scalar": SCALAR, "slots-vector": {"log_decay": log_slots}},
        slot_state,
    ),
    *variants(
        by_levels(decay),
        loglinear.loglinear,
        QKV,
        {
            "loglinear-decay": {**RESETS, "weights": level_weights},
            "loglinear-decay-none": {"weights": level_weights},
        },
        levels_and_count,
    ),
    Case(
        "loglinear-delta",
        by_levels(Delta),
        loglinear.loglinear,
        {**ERASING, **SCALAR, "weights": level_weights},
        levels_and_count,
    ),
    Case(
        "ttt",
        partial(TTT, hidden=HIDDEN, size=4, eps=0.1),
        partial(ttt.ttt, hidden=HIDDEN, size=4, eps=0.1),
        LEARNING,
        network_state,
    ),
    *(
        Case(
            f"convolution-{length}",
            LongConvolution,
            rules.long_convolution,
            {**QKV, "filter": filter_of(length)},
            partial(full_cache, length=length - 1),
        )
        for length in (1, 5, 11)
    ),
    Case("softmax", Softmax, rules.softmax, QKV, full_cache),
    Case("softmax-grouped", Softmax, rules.softmax, GROUPED, partial(cache, 4)),
    *(
        Case(
            name,
            partial(Softmax, window=window),
            partial(rules.softmax, window=window),
            GROUPED,
            partial(cache, window - 1),
        )
        for name, window in (("softmax-window", 5), ("softmax-window-1", 1))
    ),
    *(
        Case(
            f"softmax-decay{name}",
            partial(Softmax, window=window),
            partial(rules.softmax, window=window),
            {**GROUPED, "log_decay": log_scalar_resets, "sinks": scalar},
            partial(decaying_cache, 4),
        )
        for name, window in (("", None), ("-window", 5))
    ),
    Case("softmax-sinks", Softmax, rules.softmax, {**GROUPED, "sinks": scalar}, partial(cache, 4)),
    *(
        Case(
            f"windowed-{name}",
            partial(WindowedLinear, window=window, **options),
            partial(rules.windowed, window=window, **options),
            WINDOWED,
            partial(window_state, max(window - 1, 0)),
        )
        for name, window, options in (
            ("5", 5, {}),
            ("5-two", 5, {"shared": False}),
            ("1", 1, {}),
            ("0", 0, {}),
            ("0-two", 0, {"shared": False}),
            ("5-capped", 5, {"softcap": 1.5}),
            ("5-capped-two", 5, {"softcap": 1.5, "shared": False}),
        )
    ),
    *(
        Case(
            f"windowed-{window}-scaled",
            partial(WindowedLinear, window=window),
            partial(rules.windowed, window=window),
            {**WINDOWED, "log_scale": scalar},
            partial(window_state, max(window - 1, 0)),
        )
        for window in (5, 0)
    ),
    *variants(
        normalized_decay,
        rules.normalized,
        POSITIVE,
        {
            "normalized-none": {},
            "normalized-scalar": {**SCALAR, "skip": gate},
            "normalized-vector": VECTOR,
        },
        positive_matrix,
    ),
    Case(
        "normalized-floor",
        partial(normalized_decay, floor=1.0),
        partial(rules.normalized, floor=1.0),
        {**QKV, **SCALAR},
        positive_matrix,
    ),
    Case(
        "normalized-floors",
        normalized_decay,
        rules.normalized,
        {**QKV, **SCALAR, "floor": floors},
        positive_matrix,
    ),
    Case(
        "normalized-delta",
        partial(normalized_delta, floor=1.0),
        partial(rules.normalized, floor=1.0),
        {**ERASING, **SCALAR},
        positive_matrix,
    ),
    *(
        Case(name, rule, oracle, draws, scaled_matrix, plain=multiplied)
        for name, rule, oracle, draws in (
            (
                "amplified",
                amplified_decay,
                rules.mlstm,
                {**POSITIVE, **SCALAR, "log_gain": gain, "skip": gate},
            ),
            ("amplified-none", amplified_decay, rules.mlstm, {**POSITIVE, "log_gain": gain}),
            (
                "amplified-floor",
                partial(amplified_decay, floor=1.0),
                partial(rules.mlstm, floor=1.0),
                {**QKV, **SCALAR, "log_gain": gain_resets},
            ),
            (
                "amplified-floors",
                amplified_decay,
                rules.mlstm,
                {**POSITIVE, **SCALAR, "log_gain": gain, "floor": floors},
            ),
            (
                "amplified-bonus",
                amplified_bonus,
                rules.wkv,
                {**POSITIVE, **SCALAR, "log_gain": gain, "bonus": gate},
            ),
        )
    ),
]

CACHES = ("softmax", "windowed", "convolution")
"""What the names of cases begin with whose state is a cache, wholly or in part."""

LINEAR = [case for case in CASES if not case.name.startswith((*CACHES, "loglinear", "ttt"))]
MAPPED = [case for case in CASES if not case.name.startswith("ttt")]
"""The rules whose output is linear in their values."""
WITHOUT_EFFECT = (
    *("softmax", "softmax-grouped", "softmax-decay", "softmax-sinks"),
    *("loglinear-decay", "loglinear-decay-none", "loglinear-delta", "ttt"),
    *("preconditioned-scalar", "preconditioned-vector"),
)
"""The rules whose state grows, or to which a token does what depends on those before it."""
DECAYING = [case for case in CASES if "log_decay" in case.draws]

METHODS: list[Method] = [
    Recurrent(),
    Chunkwise(1),
    Chunkwise(4),
    Chunkwise(7),
    Parallel(),
    Auto(),
]
