"""What heads have of their own: decays, weights of levels, and several inputs and outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.functions import bounded_exp, init_steps, split_heads, upcast
from fastweights.layers.linear import Linear
from fastweights.shapes import Embedded, Levels


def softplus_decay(x: Tensor, log_a: Tensor, bias: Tensor) -> Tensor:
    """log α = -a softplus(x + b) ``[… h width]`` of x ``[… h·width]``, in float32 or wider."""
    opened = F.softplus(upcast(x) + bias).unflatten(-1, (len(log_a), -1))
    return -bounded_exp(log_a)[:, None] * opened


def init_softplus_decay(log_a: Tensor, bias: Tensor, largest: float = 16, least: float = 1) -> None:
    """a uniform in [least, largest]; softplus(b) log-uniform in [0.001, 0.1], as in Mamba-2."""
    init_steps(bias)
    with torch.no_grad():
        nn.init.uniform_(log_a, least, largest).log_()


class SoftplusDecay(nn.Module):
    """log α = -a softplus(x + b), a > 0: the decay of Mamba-2, of gated DeltaNet and of KDA.

    Args:
        heads: How many heads there are, each with an a of its own.
        width: Decays per head, each with a b of its own.
    """

    def __init__(self, heads: int, width: int = 1) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `init_softplus_decay` says."""
        init_softplus_decay(self.log_a, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """log α ``[… h width]`` of x ``[… h·width]``, in float32 or wider."""
        return softplus_decay(x, self.log_a, self.bias)


class LevelWeights(nn.Module):
    """λ_t^(l) = softplus(c^(l) (x_t W)^(l)), for every head (2506.04761, section 3.4).

    Args:
        d: Channels of x.
        heads: Heads h.
        count: Levels l.
    """

    def __init__(self, d: int, heads: int, count: int) -> None:
        super().__init__()
        self.W = Linear(d, heads * count, bias=False)
        self.scale = nn.Parameter(torch.empty(heads, count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Embedded) -> Levels:
        """λ ``[b t h l]``, in float32 or wider."""
        return F.softplus(upcast(self.scale) * split_heads(self.W(x), len(self.scale)))


class Ranks(nn.Module):
    """R values of one, v_i = x_i ⊙ v, and one output of R, Σ_i o_i ⊙ y_i ⊙ SiLU(z_i ⊙ gate).

    Of rank 1 nothing is weighted, v and y ⊙ SiLU(gate), and there are no parameters.

    Args:
        rank: R
        heads, width: of the values ``[h w]``; the weights x, z and o are ``[R h w]`` each
    """

    def __init__(self, rank: int, heads: int, width: int) -> None:
        super().__init__()
        weights = (nn.Parameter(torch.empty(rank, heads, width)) for _ in range(3))
        self.x, self.z, self.o = weights if rank > 1 else (None, None, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """1 for z, and 1/R for x and o, so that the output is the mean of the y_i of v/R."""
        for weight in (self.x, self.o):
            if weight is not None:
                nn.init.constant_(weight, 1 / len(weight))
        if self.z is not None:
            nn.init.ones_(self.z)

    def spread(self, v: Tensor) -> Tensor:
        """The values ``[… R h w]`` of v ``[… h w]``."""
        return _weigh(v.unsqueeze(-3), self.x)

    def gather(self, y: Tensor, gate: Tensor) -> Tensor:
        """The output ``[… h w]`` of y ``[… R h w]`` under a gate ``[… h w]``."""
        gates = F.silu(_weigh(gate.unsqueeze(-3), self.z))
        return _weigh(y * gates, self.o).sum(-3)


def _weigh(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight
