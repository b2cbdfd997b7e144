"""How rotary positions turn the keys of a model, found by reading a text at other positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fastweights.features import TURN, Landmarks, unrotate
from fastweights.linearize.convert.attention import attend_all, branches
from fastweights.linearize.convert.modes import AttentionCall, Mode
from fastweights.shapes import Output

TOKENS = 32
"""Of the text that is read at several positions."""
SHIFTS = (1, 16, 256, 4096)
"""By how much it is moved: each is told from the one before by less than half a turn, and the last
gives the speeds to ten digits."""
LARGEST_RESIDUAL = 0.01
"""Of the squares of keys, that rotations may leave out."""


@dataclass(frozen=True, eq=False)
class Turning:
    """How the rotary positions of a layer turn a key, or a query.

    Attributes:
        partners: ``[k]``, the channel that each is turned with; itself for none.
        speeds: ``[k]``, how far it turns back from one position to the next, in `TURN`.
    """

    partners: Tensor
    speeds: Tensor

    @classmethod
    def none(cls, width: int) -> Self:
        """That of a layer without rotary positions."""
        return cls(torch.arange(width), torch.zeros(width, dtype=torch.long))

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """What was turned to ``x [b t h k]`` at ``positions [b t]``."""
        partners, speeds = (s.to(x.device) for s in (self.partners, self.speeds))
        return unrotate(x, positions, partners, speeds)

    def mean(self, distances: Tensor, weights: Tensor) -> Tensor:
        """The mean P ``[k k]`` of what turns a key at these distances, in float64: a query and a
        key k as they were have the mean score q·(k P)."""
        angles = distances.double()[:, None] * self.speeds.double() * (2 * math.pi / TURN)
        cosines, sines = (weights.double() @ s for s in (angles.cos(), angles.sin()))
        # what `unrotate` makes of a key at its distance, in the mean
        unit = torch.eye(len(self.partners), dtype=torch.float64)
        return unit * cosines + unit[:, self.partners] * sines

    def write(self, *maps: Landmarks) -> None:
        """Have landmarks read what was turned."""
        for phi in maps:
            phi.turning.copy_(torch.stack([self.partners, self.speeds]))


def positions_of(config: PretrainedConfig) -> int | None:
    """Return how many positions a model has; None for no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def find_turnings(model: Any) -> dict[int, Turning]:
    """Find how the rotary positions of a linearized model turn keys, by layer.

    A text is read by softmax at several positions: what turns pairs of channels, and by how much,
    is told by the keys, whatever the family calls it. Where they do something else, or there are
    none, nothing is turned.
    """
    ids = torch.arange(TOKENS, device=model.device)[None]
    ids = ids % model.config.get_text_config().vocab_size
    # the text is moved only as far as the model has positions
    room = (positions_of(model.config) or SHIFTS[-1] + TOKENS) - TOKENS
    takes = "position_ids" in signature(type(model.base_model).forward).parameters
    shifts = [shift for shift in SHIFTS if takes and shift <= room]
    seen = [_read(model, ids, shift) for shift in (0, *shifts)]
    found, pairs = dict[int, Turning](), None
    for layer, first in seen[0].items():
        moved = {shift: keys[layer] for shift, keys in zip(shifts, seen[1:], strict=True)}
        fit = _find(first, moved, pairs) if moved and first.any() else None
        found[layer] = Turning.none(first.shape[-1]) if fit is None else fit.turning(first)
        pairs = pairs if fit is None else fit.pairs
    return found


_Pairs = tuple[Tensor, Tensor]
"""The first and the second channel of each pair ``[n]``."""


def _read(model: Any, ids: Tensor, shift: int) -> dict[int, Tensor]:
    """The keys ``[t g k]`` of a text that begins at a position."""
    mode = _KeysAlone()
    places = shift + torch.arange(ids.shape[1], device=ids.device)[None]
    given = {"position_ids": places} if shift else {}
    with _as_turned(model):
        attend_all(model, {"input_ids": ids, **given}, mode)
    return mode.keys


class _KeysAlone(Mode):
    """Softmax, which leaves behind the keys ``[t g k]`` of its layers."""

    constant = False

    def __init__(self) -> None:
        self.keys = dict[int, Tensor]()

    def attend(self, call: AttentionCall) -> Output:
        self.keys[call.layer] = call.k[0].double().cpu()
        return call.softmax()


@contextmanager
def _as_turned(model: Any) -> Iterator[None]:
    """Let branches see keys as their positions have turned them, for the length of a block."""
    maps = [m for b in branches(model).values() for m in b.modules() if isinstance(m, Landmarks)]
    turnings = [phi.turning.clone() for phi in maps]
    for phi in maps:
        phi.turning[:, 1].zero_()
    try:
        yield
    finally:
        for phi, own in zip(maps, turnings, strict=True):
            phi.turning.copy_(own)


class _PairFit(NamedTuple):
    """The speeds ``[n]`` of pairs, in radians, and which part of the squares of keys turning by
    them leaves out."""

    pairs: _Pairs
    speeds: Tensor
    residual: float

    def turning(self, keys: Tensor) -> Turning:
        """That of keys of a layer."""
        found, (one, other) = Turning.none(keys.shape[-1]), self.pairs
        turns = (self.speeds * (TURN / (2 * math.pi))).round().long()
        found.partners[one], found.partners[other] = other, one
        found.speeds[one], found.speeds[other] = turns, -turns
        return found


def _find(first: Tensor, moved: Mapping[int, Tensor], known: _Pairs | None) -> _PairFit | None:
    """What turns the keys of a layer, by pairs as in another layer where these do as well; None for
    nothing."""
    if known is not None and (fit := _fit(first, moved, known)).residual < LARGEST_RESIDUAL:
        return fit
    fits = (_fit(first, moved, pairs) for pairs in _layouts(first.shape[-1]))
    best = min(fits, key=lambda fit: fit.residual)
    return best if best.residual < LARGEST_RESIDUAL else None


def _layouts(width: int) -> Iterator[_Pairs]:
    """Where families have pairs: halves of channels, or neighbours, of the first ones or the
    last."""
    for turned in range(width - width % 2, 0, -2):
        half = torch.arange(turned // 2)
        for start in sorted({0, width - turned}):
            yield start + half, start + half + turned // 2
            yield start + 2 * half, start + 2 * half + 1


def _fit(first: Tensor, moved: Mapping[int, Tensor], pairs: _Pairs) -> _PairFit:
    one, other = pairs
    # a pair of channels as one number, which a shift by s multiplies by e^(iωs)
    before = torch.complex(first[..., one], first[..., other])
    after = {s: torch.complex(keys[..., one], keys[..., other]) for s, keys in moved.items()}
    speeds, residual = torch.zeros(len(one), dtype=torch.float64), 0.0
    for shift, keys in after.items():
        # the angle that ω leaves open so far, by least squares over tokens and heads
        turned = before * torch.polar(torch.ones_like(speeds), speeds * shift)
        speeds = speeds + (keys * turned.conj()).sum((0, 1)).angle() / shift
    # what the turned pairs leave out, and how far channels without a pair have moved
    still = torch.ones(first.shape[-1], dtype=torch.bool)
    still[one] = still[other] = False
    for shift, keys in after.items():
        turned = before * torch.polar(torch.ones_like(speeds), speeds * shift)
        residual += float((keys - turned).abs().square().sum())
        residual += float((moved[shift] - first)[..., still].square().sum())
    return _PairFit(pairs, speeds, residual / (len(moved) * float(first.square().sum())))
