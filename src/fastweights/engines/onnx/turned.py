"""Complex decays as real ones: a state that turns, in a frame that turns with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fastweights.recurrence import Decay


@dataclass(frozen=True, eq=False)
class Turned:
    """A complex `Decay` as linear attention on real streams.

    With θ_t the sum of the angles of α_1, …, α_t, S'_t = diag(e^(-iθ_t)) S_t decays by |α_t|, is
    written under k_t e^(-iθ_t) and read by q_t e^(iθ_t). The real and the imaginary part of S' are
    halves of a real state, and every head has two queries, one for each part of o.

    Attributes:
        streams: q ``[b t 2h 2k]``, k ``[b t h 2k]``, v ``[b t h v]``, log |α| ``[b t h 2k]``, and
            None: nothing is erased
        last: e^(iθ) of the last token, ``[b h k 1]``
    """

    streams: tuple[Tensor, Tensor, Tensor, Tensor, None]
    last: Tensor

    @classmethod
    def of(cls, rule: Decay) -> Self:
        """
        Args:
            rule: a record that `turns`
        """
        log_decay, k, v = rule.log_decay, rule.key, rule.v
        assert log_decay is not None
        log_decay = log_decay.expand(*rule.shape, rule.q.shape[-1])
        turn = _unit_numbers(log_decay.imag)
        if v.is_complex():
            k, v = k * v, torch.ones_like(v.real)
        q, k = rule.q * turn, k * turn.conj()
        both = [torch.cat([q.real, -q.imag], -1), torch.cat([q.imag, q.real], -1)]
        queries, keys = torch.stack(both, 3).flatten(2, 3), torch.cat([k.real, k.imag], -1)
        decays = log_decay.real.repeat(1, 1, 1, 2)
        return cls((queries, keys, v, decays, None), turn[:, -1, :, :, None])

    def enter(self, state: Tensor) -> Tensor:
        """The real state ``[b h 2k v]`` before the first token, of the complex ``[b h k v]``."""
        return torch.cat([state.real, state.imag], 2)

    def leave(self, o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The complex o ``[b t h v]`` and state after the last token, of real ones."""
        real, imag = o.unflatten(2, (-1, 2)).unbind(3)
        parts = state.unflatten(2, (2, -1)).unbind(2)
        return torch.complex(real, imag), self.last * torch.complex(*parts)


def turns(rule: Decay) -> bool:
    """Whether a record can be `Turned`: it has complex decays, and values that are real or have one
    channel.
    """
    if rule.log_decay is None or rule.accumulator != torch.complex64:
        return False
    return not rule.v.is_complex() or rule.v.shape[-1] == 1


def _unit_numbers(angles: Tensor) -> Tensor:
    """e^(iθ_t) of the sums θ_t of angles along time; they grow with it, and are summed in float64
    until they have been turned back by whole circles.
    """
    total, circle = angles.double().cumsum(1), 2 * math.pi
    left = (total - circle * (total / circle).round()).float()
    return torch.complex(left.cos(), left.sin())
