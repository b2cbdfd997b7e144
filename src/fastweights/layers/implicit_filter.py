"""Filters of long convolutions, made of positions (Hyena, Poli et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.functions import upcast
from fastweights.layers.wide import WideParameters

SLOWEST, FASTEST = math.log(100) / 1.5, math.log(100) / 0.3
"""Rates of windows that have fallen to 1/100 after 1.5 and after 0.3 of the filter's length."""


class _PlaceLayer(WideParameters):
    """x W + b in the dtype of x, as neighbouring places differ by less than bfloat16 can say. It
    reads no tokens, and is none of the linear layers that are adapted or quantised."""

    def __init__(self, width: int, columns: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, width))
        self.bias = nn.Parameter(torch.empty(columns)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's own linear layer."""
        bound = self.weight.shape[1] ** -0.5
        for part in self.parameters():
            nn.init.uniform_(part, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class _Made(NamedTuple):
    """A filter and the weights that it was made of."""

    weights: list[Tensor]
    taps: Tensor

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether the weights are what they were, number by number: who wrote them, and how, leaves
        no other trace.
        """
        return all(
            old.dtype is new.dtype and torch.equal(old, new)
            for old, new in zip(self.weights, weights, strict=True)
        )


class ImplicitFilter(WideParameters):
    """h_τ = e^(-δ τ / (l - 1)) MLP(z_τ) ``[h l]``, plus D where τ = 0: as many parameters for a
    filter of any length (Hyena, section 3.3).

    z_τ = (τ / (l - 1), cos(f 2πτ / l), -sin(f 2πτ / l)) for `bands` frequencies f from 10⁻⁴ to
    bands - 1. The MLP has three layers of sin(ω ⊙ ·), whose ω they share, and one without. δ grows
    from head to head, and is no parameter.

    On a CPU, where no gradients are recorded, a filter is kept as long as its weights are the same,
    as a decoded token would take longer to make it than to read by it.
    """

    def __init__(self, heads: int, length: int, width: int, bands: int, frequency: float) -> None:
        super().__init__()
        self.heads, self.length, self.bands, self.frequency = heads, length, bands, frequency
        widths = (1 + 2 * bands, width, width, width)
        self.hidden = nn.ModuleList(_PlaceLayer(*pair) for pair in pairwise(widths))
        self.omega = nn.Parameter(torch.empty(width))
        self.last = _PlaceLayer(width, heads, bias=False)
        self.D = nn.Parameter(torch.empty(heads))
        self._made: _Made | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """ω is the frequency; D is standard normal."""
        nn.init.constant_(self.omega, self.frequency)
        nn.init.normal_(self.D)

    def forward(self) -> Tensor:
        weights = list(self.parameters())
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _elsewhere(weights):
            return self._make()
        if self._made is None or not self._made.is_of(weights):
            with torch.inference_mode(mode=False), torch.no_grad():
                self._made = _Made([weight.clone() for weight in weights], self._make())
        return self._made.taps

    def _make(self) -> Tensor:
        D, omega = upcast(self.D), upcast(self.omega)
        place = torch.arange(self.length, device=D.device, dtype=D.dtype)[:, None]
        share = place / max(self.length - 1, 1)
        rates = torch.linspace(SLOWEST, FASTEST, self.heads, device=D.device, dtype=D.dtype)
        angles = (
            2
            * math.pi
            / self.length
            * place
            * torch.linspace(1e-4, self.bands - 1, self.bands, device=D.device, dtype=D.dtype)
        )
        z = torch.cat([share, angles.cos(), -angles.sin()], -1)
        for layer in self.hidden:
            z = torch.sin(omega * layer(z))
        taps = (self.last(z) * torch.exp(-share * rates)).mT
        return torch.cat([taps[:, :1] + D[:, None], taps[:, 1:]], -1)


def _elsewhere(weights: Sequence[Tensor]) -> bool:
    """Whether the weights are not numbers on this CPU: on another device, or stand-ins of a graph
    or of a transformation.
    """
    plain = all(type(weight) is nn.Parameter and weight.device.type == "cpu" for weight in weights)
    return torch.compiler.is_compiling() or not plain
