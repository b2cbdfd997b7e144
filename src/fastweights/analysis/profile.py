"""The profile of a model on a text: the memory and the attention map of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.analysis import maps, memory
from fastweights.analysis.algorithms import AlgorithmSupport, algorithm_support
from fastweights.analysis.capture import capture_projections
from fastweights.recurrence import LTV, Mesa, NoFiniteFormError, Recurrence
from fastweights.recurrence.head_groups import HeadGroups
from fastweights.shapes import Map


@dataclass(frozen=True)
class ProfileLimits:
    """Limits on what a profile inspects.

    Attributes:
        heads: Most heads of a layer, evenly spaced.
        window: Tokens of the maps, and on each side of a cut for the Hankel values.
        cuts: Number of places in the text where the state is examined.
    """

    heads: int = 16
    window: int = 128
    cuts: int = 4

    def __post_init__(self) -> None:
        if min(self.heads, self.window, self.cuts) < 1:
            raise ValueError(f"{self}: at least one head, token and cut must be looked at")


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """The memory of one layer's system; h are the chosen heads.

    Attributes:
        eigenvalues: ``[t h k]``, eigenvalues of Λ_t.
        half_lives: ``[t h k]``, in tokens.
        hankel: ``[cuts h k]``, singular values around each cut.
        dimensions: ``[cuts h]``, their effective number.
        log_gains: ``[cuts h k]``, log gains of the transitions over the window before each cut.
        response: ``[h lag]``, |Φ| by lag.
    """

    eigenvalues: Tensor
    half_lives: Tensor
    hankel: Tensor
    dimensions: Tensor
    log_gains: Tensor
    response: Tensor


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The profile of one mixer of a model on the first sequence of a text.

    Its tokens t are steps where a rule makes several of them per token.

    Attributes:
        path: The mixer's path in the model.
        mixer: Name of the mixer.
        rule: Name of its recurrence.
        heads: Numbers of the chosen heads.
        of: Number of all heads.
        phi: ``[h t s]``, the map of the first `window` tokens; None for a rule without maps.
        memory: The memory of its system; None for a rule without a finite linear form.
        algorithms: The algorithms that can run it; None likewise.
        normalisers: ``[t h]``, or None.
        examined: The tokens at which a Mesa layer's systems are examined; empty for other layers.
        solver: Mesa's `LinearSystems` at these tokens; None for other layers.
    """

    path: str
    mixer: str
    rule: str
    heads: list[int]
    of: int
    phi: Map | None
    memory: MemoryProfile | None
    algorithms: list[AlgorithmSupport] | None
    normalisers: Tensor | None
    examined: tuple[int, ...]
    solver: memory.LinearSystems | None


@dataclass(frozen=True, eq=False)
class Profile:
    """The profile of all layers of a model on a text.

    Attributes:
        name: Name of the model.
        tokens: Tokens of the text.
        parameters: Number of the model's parameters.
        extent: The limits of the profile.
        layers: The layers' profiles.
    """

    name: str
    tokens: int
    parameters: int
    extent: ProfileLimits
    layers: list[LayerProfile]


CapturedRecords = dict[str, tuple[str, Recurrence]]
"""The path of a layer in its model → the name of its mixer, and what it evaluates."""


def mixer_records(model: nn.Module, ids: Tensor) -> CapturedRecords:
    """What every mixer of a model evaluates on a text ``[1 t]``."""
    with capture_projections(model) as found, torch.no_grad():
        model(ids)
    return {
        path: (type(model.get_submodule(path)).__name__, driven.recurrence)
        for path, driven in found.items()
    }


def profile(
    name: str,
    model: nn.Module,
    ids: Tensor,
    extent: ProfileLimits = ProfileLimits(),
    capture: Callable[[nn.Module, Tensor], CapturedRecords] = mixer_records,
    follow: Callable[[list[str], str], Iterable[str]] = lambda paths, _: paths,
) -> Profile:
    """Run a model on a text and profile every layer.

    Args:
        name: Name of the model in reports.
        model: A model of this library, or one that `capture` knows.
        ids: Token ids ``[1 t]``.
        extent: Limits on what is inspected.
        capture: What its layers evaluate.
        follow: Yields the layers' paths, and may tell somebody of each; it is told what is done.

    Raises:
        ValueError: If the text is too short.
    """
    if ids.shape[1] < 8:
        raise ValueError(f"the text has {ids.shape[1]} tokens; an analysis needs 8 or more")
    found = capture(model, ids)
    if not found:
        raise ValueError(f"{name} has no mixer of this library in it")
    with torch.no_grad():
        paths = follow(list(found), "profiling layers")
        layers = [_layer(path, *found.pop(path), extent) for path in paths]
    parameters = sum(p.numel() for p in model.parameters())
    return Profile(name, ids.shape[1], parameters, extent, layers)


def _layer(path: str, mixer: str, record: Recurrence, extent: ProfileLimits) -> LayerProfile:
    heads = spread_evenly(record.shape[2], extent.heads)
    system = _system(record)
    first = record[: extent.window]
    eta = memory.normalisers(record)
    examined, solver = _solver(record)
    return LayerProfile(
        path=path,
        mixer=mixer,
        rule=type(record).__name__,
        heads=heads,
        of=record.shape[2],
        phi=_map(first, heads),
        memory=memory_of(record, heads, extent),
        algorithms=None if system is None else algorithm_support(system),
        normalisers=None if eta is None else eta[0][:, heads],
        examined=examined,
        solver=solver,
    )


def memory_of(record: Recurrence, heads: list[int], extent: ProfileLimits) -> MemoryProfile | None:
    """The memory of these heads, which may be in groups with systems of their own."""
    if isinstance(record, HeadGroups):
        return _memory_of_groups(record, heads, extent)
    system = _system(record)
    return None if system is None else _memory(system.heads(heads), extent)


def _memory_of_groups(
    record: HeadGroups, heads: list[int], extent: ProfileLimits
) -> MemoryProfile | None:
    # heads are measured group by group in the order of their places, and put back in order
    places = [record.order[head] for head in heads]
    parts, first = list[MemoryProfile](), 0
    for group in record.groups:
        own = sorted(place - first for place in places if 0 <= place - first < group.shape[2])
        part = memory_of(group, own, extent) if own else None
        if own and part is None:
            return None
        parts += [part] if part is not None else []
        first += group.shape[2]
    return _side_by_side(parts, [sorted(places).index(place) for place in places])


def _side_by_side(parts: list[MemoryProfile], order: list[int]) -> MemoryProfile:
    """The memories of groups of heads as one. Where a group has fewer rows than another, rows that
    nothing is written to stand for the rest.
    """
    nothing = {"log_gains": -torch.inf}

    def joined(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        rows, axis = max(x.shape[-1] for x in tensors), 0 if name == "response" else 1
        if name != "dimensions":
            value = nothing.get(name, 0)
            tensors = [F.pad(x, (0, rows - x.shape[-1]), value=value) for x in tensors]
        return torch.cat(tensors, axis).index_select(axis, torch.tensor(order))

    return MemoryProfile(**{field.name: joined(field.name) for field in fields(MemoryProfile)})


def _solver(record: Recurrence) -> tuple[tuple[int, ...], memory.LinearSystems | None]:
    """(places, what a solver finds there); none and None for a rule without systems to solve."""
    if not isinstance(record, Mesa):
        return (), None
    examined = cuts(len(record), 16)
    return examined, memory.linear_systems(record, examined)


def _map(record: Recurrence, heads: list[int]) -> Map | None:
    try:
        return maps.attention(record, heads)[0]
    except NoFiniteFormError:
        return None


def _system(record: Recurrence) -> LTV | None:
    try:
        return record.ltv()
    except NoFiniteFormError:
        return None


def _memory(system: LTV, extent: ProfileLimits) -> MemoryProfile:
    places = cuts(len(system) - 1, extent.cuts + 1)[:-1] or (len(system) // 2,)
    window = min(extent.window, len(system) // 2)
    hankel = torch.stack([memory.hankel(system, cut, window)[0] for cut in places])
    gains = [memory.log_gains(system[max(0, cut - window) : cut])[0] for cut in places]
    return MemoryProfile(
        eigenvalues=system.eigenvalues()[0],
        half_lives=memory.half_lives(system)[0],
        hankel=hankel,
        dimensions=memory.effective_dimension(hankel),
        log_gains=torch.stack(gains),
        response=memory.response(memory.map_and_input_factor(system[: extent.window])[0])[0],
    )


def spread_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0 … count - 1, evenly spaced, with the first and the
    last."""
    chosen = min(count, most)
    return sorted({round(i * (count - 1) / max(1, chosen - 1)) for i in range(chosen)})


def cuts(length: int, count: int) -> tuple[int, ...]:
    """Return `count` ascending places in 1 … length, the last of them `length`.

    There are fewer places if there are fewer tokens.
    """
    return tuple(sorted({max(1, round(length * (i + 1) / count)) for i in range(count)}))
