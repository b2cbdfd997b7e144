"""The decay that a softplus opens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.functions import bounded_exp, init_steps, upcast


def softplus_decay(x: Tensor, log_a: Tensor, bias: Tensor) -> Tensor:
    """log α = -a softplus(x + b) ``[… h width]`` of x ``[… h·width]``, in float32 or wider."""
    opened = F.softplus(upcast(x) + bias).unflatten(-1, (len(log_a), -1))
    return -bounded_exp(log_a)[:, None] * opened


def init_softplus_decay(log_a: Tensor, bias: Tensor, largest: float = 16) -> None:
    """a uniform in [1, largest]; softplus(b) log-uniform in [0.001, 0.1], as in Mamba-2."""
    init_steps(bias)
    with torch.no_grad():
        nn.init.uniform_(log_a, 1, largest).log_()


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
