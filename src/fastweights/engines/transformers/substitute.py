"""A function of transformers' modelling files, ours in its place, and the proof that they agree."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.transformers.documents import BOUNDS, current_documents

TOLERANCE = 1e-3
"""How far ours may be from theirs on the example calls, relative to the largest number: rounding
in float32 stays far below it, any other formula does not.
"""


@dataclass(frozen=True)
class Call:
    """Arguments of a call.

    Attributes:
        may_fail: whether versions of transformers that refuse it are known, and never make it
        reads: the attribute that this is an example of; it says nothing of versions without
    """

    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    may_fail: bool = False
    reads: str | None = None

    def make(self, function: Callable[..., Any]) -> list[Tensor]:
        """What `function` returns of it, and what it leaves in the tensors that it was given."""
        arguments = [_copy(a) for a in self.arguments]
        named = {name: _copy(value) for name, value in self.named.items()}
        found = function(*arguments, **named)
        return [*_tensors(found), *_tensors([*arguments, *named.values()])]


@dataclass
class Switch:
    """Whether a patch is in force: those who hold one of its functions still, as accelerate's hooks
    do, have transformers' own behind it after `undo`.
    """

    on: bool = True


@dataclass(frozen=True)
class Substitute:
    """What takes the place of a global function, or a class's method, of modelling files.

    Attributes:
        name: ``function`` or ``Class.method``, as modelling files have it
        compute: ours; a call that it does not cover gives NotImplemented, before anything is
            changed
        calls: examples on which ours has to give what theirs gives
        package: whose kernel transformers takes where it is installed: tensors of a GPU go there
    """

    name: str
    compute: Callable[..., Any]
    calls: Callable[[], Iterable[Call]]
    package: str | None = None

    def put_before(self, theirs: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
        """The function for their place: ours, and theirs for what ours leaves to it."""

        @functools.wraps(theirs)
        def function(*arguments: Any, **named: Any) -> Any:
            if not switch.on:
                return theirs(*arguments, **named)
            if self._reads(arguments, named):
                found = self.compute(*arguments, **named)
                if found is not NotImplemented:
                    return found
            if _loses_documents(named):
                raise ValueError(
                    f"{self.name} is called in a way that only transformers' own function covers,"
                    " which would mix the documents of packed rows: give each a row of its own"
                )
            return theirs(*arguments, **named)

        setattr(function, MARK, self)
        return function

    def _reads(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether ours is for tensors of this device."""
        if torch.compiler.is_exporting():
            return False
        stream = _first_tensor(chain(arguments, named.values()))
        if stream is None or stream.is_cpu:
            return True
        return stream.is_cuda and (_loses_documents(named) or not _installed(self.package))

    def disagreement(self, theirs: Callable[..., Any]) -> str | None:
        """Why ours must not take the place of `theirs`; None if both are the same."""
        plain = inspect.unwrap(theirs)
        known = inspect.signature(self.compute).parameters.values()
        takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in known)
        new = _names(plain) - _names(self.compute)
        if new and not takes_any:
            return f"it takes {', '.join(sorted(new))}, which fastweights does not know"
        for call in self.calls():
            if call.reads is not None and call.reads not in plain.__code__.co_names:
                continue
            try:
                expected = call.make(plain)
            except Exception as error:
                if call.may_fail:
                    continue
                return f"an example call fails there ({type(error).__name__}: {error})"
            found = call.make(self.compute)
            if len(found) != len(expected) or not all(map(_close, found, expected)):
                return "it computes something else than fastweights does"
        return None


MARK = "__fastweights_substitute__"
"""The attribute by which a function that is in theirs' place is known."""


def _loses_documents(named: dict[str, Any]) -> bool:
    """Whether packed rows are read by a call that does not name their documents."""
    told = any(named.get(name) is not None for name in ("seq_idx", *BOUNDS))
    return current_documents() is not None and not told


def _names(function: Callable[..., Any]) -> set[str]:
    """The names of its parameters, but not of those that take what is left."""
    parameters = inspect.signature(function).parameters.values()
    left = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {p.name for p in parameters if p.kind not in left}


@functools.cache
def _installed(package: str | None) -> bool:
    return package is not None and find_spec(package) is not None


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
    return None


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, (tuple, list)) else [values]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _copy(value: Any) -> Any:
    """A tensor that may be written to; an expanded one, which may not, stays so."""
    return value.clone() if isinstance(value, Tensor) and 0 not in value.stride() else value


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    size = expected.double().abs().max().item()
    return bool((found.double() - expected.double()).abs().max() <= TOLERANCE * max(size, 1e-3))
