"""Which mixers are of one kind: their streams end in the same records, with decays alike.

A test that costs much per mixer is run for the first of each kind every time, and for the others,
as those to come, by the slow suite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch

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


def first_of_each(names: Iterable[str]) -> list[str]:
    """The first name of each kind."""
    return list({kind_of(name): name for name in reversed(list(names))}.values())


def one_of_each(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test, all but the first of each kind marked `slow`."""
    names = list(names)
    always = first_of_each(names)
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in always else slow) for name in names]


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
