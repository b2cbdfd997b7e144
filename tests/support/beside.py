"""Rules beside a window: how to draw their streams, and the literal loops they must agree with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch import Generator, Tensor

from cases import (
    ERASING,
    GROUPED,
    OPTIMAL,
    POSITIVE,
    Case,
    Draw,
    Shape,
    State,
    as_given,
    direct_mesa,
    gate,
    log_scalar,
    log_vector,
    normalized_decay,
    symmetric,
)
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import Decay, Delta, Recurrence, Windowed
from oracles import rules

OWN = str.maketrans({"q": "rq", "k": "rk", "v": "rv"})
WRITTEN = ("k", "v", "beta", "log_decay")
"""Streams of a rule that say what it writes, in the order of their fields."""


@dataclass(frozen=True)
class Rule:
    """A rule that may stand beside a window.

    Attributes:
        record: from its streams to the record
        oracle: its literal loop, of the sums under a normaliser that is shared
        draws: a stream each
        options: of the window
        adjust: makes a legal state of a perturbed one
    """

    record: Callable[..., Recurrence]
    oracle: Callable[..., Any]
    draws: dict[str, Draw]
    options: dict[str, Any]
    adjust: Callable[[Any], Any] = as_given


SHARED = {"shared": True}
RULES = {
    "linear": Rule(normalized_decay, rules.decay, POSITIVE, SHARED),
    "gla": Rule(normalized_decay, rules.decay, {**POSITIVE, "log_decay": log_vector}, SHARED),
    "gla-own": Rule(
        normalized_decay,
        rules.normalized,
        {**POSITIVE, "log_decay": log_vector},
        {"softcap": 1.5},
    ),
    "retention": Rule(
        Decay, rules.decay, {**POSITIVE, "log_decay": lambda s, g: log_scalar(s, g)[:1, :1]}, {}
    ),
    "delta": Rule(Delta, rules.delta, {**ERASING, "log_decay": log_scalar}, {}),
    "kda": Rule(Delta, rules.delta, {**ERASING, "log_decay": log_vector}, {}),
    "mesa": Rule(direct_mesa, rules.mesa, {**OPTIMAL, "log_decay": log_scalar}, {}, symmetric),
}


def beside_window(name: str, window: int, sinks: int = 0) -> Case:
    """The rule `name` beside a window, whose own q, k and v are called rq, rk and rv."""
    rule = RULES[name]
    names = {n.translate(OWN) if len(n) == 1 else n: n for n in rule.draws}
    options = {"window": window, "sinks": sinks, **rule.options}

    def record(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, **streams: Tensor) -> Windowed:
        inner = rule.record(**{names[n]: s for n, s in streams.items()})
        return Windowed(inner, q, k, v, mix, **options)

    def literally(q: Any, k: Any, v: Any, mix: Any, state: Any = None, **streams: Any) -> Any:
        of_rule = {names[n]: s for n, s in streams.items()}
        written = [n for n in WRITTEN if n in of_rule]
        return rules.beside_window(
            rule.oracle, of_rule, written, q, k, v, mix, state=state, **options
        )

    def come_to(shape: Shape, generator: Generator) -> State:
        streams = {n: draw(replace(shape, t=4), generator) for n, draw in draws.items()}
        return evaluate(record(**streams), method=Recurrent())[1]

    draws = {**GROUPED, "mix": gate, **{n: rule.draws[own] for n, own in names.items()}}
    label = f"{name}-{window}" + f"-sinks-{sinks}" * bool(sinks)
    return Case(label, record, literally, draws, come_to, partial(adjust_rule, rule.adjust))


def adjust_rule(adjust: Callable[[Any], Any], state: Any) -> Any:
    """`adjust` of the two parts of the rule's state, which stand before the age."""
    if adjust is as_given:
        return state
    *others, gram, memory, age = state
    return *others, *adjust((gram, memory)), age


SOME = [
    beside_window(name, *sizes)
    for name, sizes in product(("gla", "gla-own", "kda", "mesa"), ((2, 0), (3, 2)))
]
