"""Learnt feature maps φ of queries and keys, one matrix per head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import elu_plus_one, precise


class LearnedFeatures(nn.Module, ABC):
    """φ(x) = (f(x W), f(-x W)) of ``x [b t h w]`` for a W ``[w f]`` per head, in float32 or wider: ``[b t h 2f]``.

    W starts as the identity's first f columns (LoLCATs, 2024; Hedgehog, 2024).
    """

    def __init__(self, heads: int, width: int, features: int) -> None:
        super().__init__()
        self.heads = heads
        self.W = nn.Parameter(torch.empty(heads * features, width, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.dirac_(self.W, groups=self.heads)

    @abstractmethod
    def activate(self, x: Tensor) -> Tensor:
        """f"""

    def forward(self, x: Tensor) -> Tensor:
        W = precise(self.W).squeeze(-1).unflatten(0, (self.heads, -1))
        x = torch.einsum("bthw,hfw->bthf", precise(x), W.to(torch.promote_types(x.dtype, W.dtype)))
        return torch.cat([self.activate(x), self.activate(-x)], dim=-1)


class Hedgehog(LearnedFeatures):
    """f = softmax over the features: bounded, and a row of keys weighs as much as any other."""

    def activate(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Exponential(LearnedFeatures):
    """f = exp"""

    def activate(self, x: Tensor) -> Tensor:
        return x.exp()


class Elu(LearnedFeatures):
    """f = 1 + ELU"""

    def activate(self, x: Tensor) -> Tensor:
        return elu_plus_one(x)


class Relu(LearnedFeatures):
    """f = ReLU (T2R, Kasai et al., 2021)"""

    def activate(self, x: Tensor) -> Tensor:
        return F.relu(x)
