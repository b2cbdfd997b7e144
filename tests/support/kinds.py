"""Which mixers are of one kind: their streams end in the same records, with decays alike; and
which have states of one form.

A test that costs much per mixer is run for the first of each kind every time, and for the others,
as those to come, by the slow suite.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch

from cases import Case
from cases import parts as tensors_of
from fastweights import MIXERS
from fastweights.layers import TokenContext
from fastweights.recurrence import Recurrence

Kind = tuple[Any, ...]


@cache
def kind_of(name: str) -> Kind:
    """The kind of a mixer; a name of anything else is a kind of its own."""
    if name not in MIXERS:
        return (name,)
    x = torch.zeros(1, 3, 16)
    record, _ = MIXERS[name](d=16).project(x, TokenContext.start(x))
    return _kind(record)


@cache
def form_of(name: str) -> Kind:
    """What the state of a mixer is made of; what copies, cuts, reorders and keeps states sees no
    more of a mixer.
    """
    if name not in MIXERS:
        return (name,)
    mixer = MIXERS[name](d=16)
    short, long = (mixer(torch.zeros(1, t, 16))[1] for t in (3, 5))
    parts = [(part.dim(), part.dtype) for part in tensors_of(short.memory)]
    return (*parts, bool(short.tails), short.nbytes < long.nbytes)


def first_of_each(names: Iterable[str], kind: Callable[[str], Kind] = kind_of) -> list[str]:
    """The first name of each kind."""
    return list({kind(name): name for name in reversed(list(names))}.values())


def slow_but(values: Iterable[Any], always: Container[Any]) -> list[Any]:
    """Values as parameters of a test, marked `slow` unless they are among `always`."""
    slow = pytest.mark.slow
    return [pytest.param(value, marks=() if value in always else slow) for value in values]


def one_of_each(names: Iterable[str], kind: Callable[[str], Kind] = kind_of) -> list[Any]:
    """The names as parameters of a test, all but the first of each kind marked `slow`."""
    names = list(names)
    return slow_but(names, first_of_each(names, kind))


def one_of_each_rule(cases: Iterable[Case]) -> list[Any]:
    """Cases of recurrences as parameters of a test, likewise."""
    cases, seen = list(cases), set[Kind]()
    found = []
    for case in cases:
        kind = _kind(case.rule(**case.streams()))
        found.append(pytest.param(case, marks=pytest.mark.slow if kind in seen else ()))
        seen.add(kind)
    return found


def _kind(record: Recurrence) -> Kind:
    """Its class, those of records in it, and how it decays."""
    values = ((field.name, getattr(record, field.name)) for field in fields(record))  # type: ignore[arg-type]
    inner = [_part(name, value) for name, value in values]
    return (type(record), *(part for part in inner if part is not None))


def _part(name: str, value: object) -> object:
    if isinstance(value, Recurrence):
        return _kind(value)
    if name == "log_decay" and isinstance(value, torch.Tensor):
        width = "a channel" if value.shape[-1] > 1 else "a head"
        return (width, value.is_complex())
    return None
