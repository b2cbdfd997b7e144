"""Channel mixers and low-rank projections."""

from __future__ import annotations

from torch import nn

from fastweights.layers.linear import Linear, project_each
from fastweights.shapes import Embedded


class GatedMLP(nn.Module):
    """The gated MLP (σ(x W_1) ⊙ x W_2) W_3; with σ = SiLU the SwiGLU of MetaLA and MesaNet."""

    def __init__(self, d: int, width: int, activation: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.W_1 = Linear(d, width, bias=bias)
        self.W_2 = Linear(d, width, bias=bias)
        self.W_3 = Linear(width, d, bias=bias)

    @property
    def W_o(self) -> nn.Linear:
        return self.W_3

    def forward(self, x: Embedded) -> Embedded:
        gate, z = project_each(x, self.W_1, self.W_2)
        return self.W_3(self.activation(gate) * z)


class MLP(nn.Module):
    """The plain MLP σ(x W_1) W_2 of GPT-2 and Pythia."""

    def __init__(self, d: int, width: int, activation: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.W_1 = Linear(d, width, bias=bias)
        self.W_2 = Linear(width, d, bias=bias)

    @property
    def W_o(self) -> nn.Linear:
        return self.W_2

    def forward(self, x: Embedded) -> Embedded:
        return self.W_2(self.activation(self.W_1(x)))


class LowRank(nn.Sequential):
    """A projection x W¹ W² (+ b) through `rank` channels."""

    def __init__(self, d: int, rank: int, width: int, *, bias: bool) -> None:
        super().__init__(Linear(d, rank, bias=False), Linear(rank, width, bias=bias))


def factorized(d: int, rank: int | None, width: int, *, bias: bool) -> nn.Module:
    """A `LowRank` of this rank; None for one whole matrix."""
    return Linear(d, width, bias=bias) if rank is None else LowRank(d, rank, width, bias=bias)
