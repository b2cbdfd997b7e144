"""Several inputs and outputs per head (Mamba-3's MIMO, Lahoti et al., 2026)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
