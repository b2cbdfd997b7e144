"""The decay that a softplus opens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.functions import bounded_exp, init_steps, upcast


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
        """a uniform in [1, 16]; softplus(b) log-uniform in [0.001, 0.1], as in Mamba-2."""
        init_steps(self.bias)
        with torch.no_grad():
            nn.init.uniform_(self.log_a, 1, 16).log_()

    def forward(self, x: Tensor) -> Tensor:
        """log α ``[… h width]`` of x ``[… h·width]``, in float32 or wider."""
        opened = F.softplus(upcast(x) + self.bias).unflatten(-1, (len(self.log_a), -1))
        return -bounded_exp(self.log_a)[:, None] * opened
