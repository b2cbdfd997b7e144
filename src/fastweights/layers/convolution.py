"""Short causal convolutions and the token shift."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.context import TokenContext
from fastweights.ops.convolution import convolve
from fastweights.shapes import Embedded


class ShortConvolution(nn.Module):
    """Causal depthwise convolution: y_t = Σ_j w_j ⊙ x_{t-j}, j < `size`.

    Attributes:
        name: its path in the mixer, under which it finds and leaves its tail
    """

    name = ""

    def __init__(self, d: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    @property
    def taps(self) -> Tensor:
        """``[size d]``, that of the current input last."""
        return self.weight

    def forward(
        self, x: Embedded, past: TokenContext, bias: Tensor | None = None, *, silu: bool = False
    ) -> Embedded:
        """y, or with a bias of the mixer's y + bias, and SiLU of that."""
        before = self.size - 1
        tail = past.tail(self.name, x, before)
        document = None if past.document is None else F.pad(past.document, (before, 0))
        if past.keep is None:
            return self._convolve(past, tail, x, document, bias, silu=silu)
        kept = F.pad(past.keep, (before, 0), value=True)
        order = kept.long().argsort(dim=1, stable=True)
        seen = _take_tokens(torch.cat([tail, x], dim=1), order)
        document = None if document is None else document.gather(1, order)
        first, rest = seen.tensor_split([before], dim=1)
        y = self._convolve(past, first, rest, document, bias, silu=silu)
        behind = F.pad(y, (0, 0, before, 0))
        return _take_tokens(behind, order.argsort(dim=1))[:, before:]

    def _convolve(
        self,
        past: TokenContext,
        tail: Tensor,
        x: Tensor,
        document: Tensor | None,
        bias: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """The outputs; the tail for what follows is left in `past`."""
        y, following = convolve(tail, x, self.taps, document, bias, silu=silu)
        past.save_tail(self.name, following)
        return y


class TokenShift(ShortConvolution):
    """RWKV's token shift: μ ⊙ x_t + (1 - μ) ⊙ x_{t-1} (RWKV-4 eq. 11-13)."""

    def __init__(self, d: int) -> None:
        nn.Module.__init__(self)
        self.size = 2
        self.mu = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.mu, 0.5)

    @property
    def taps(self) -> Tensor:
        return torch.stack([1 - self.mu, self.mu])

    def _convolve(
        self,
        past: TokenContext,
        tail: Tensor,
        x: Tensor,
        document: Tensor | None,
        bias: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """As every convolution; a single token that goes on is moved towards the one before it."""
        if x.shape[1] != 1 or document is not None or bias is not None or silu:
            return super()._convolve(past, tail, x, document, bias, silu=silu)
        past.save_tail(self.name, x)
        return torch.addcmul(tail, x - tail, self.mu)


class PreviousToken(ShortConvolution):
    """x_{t-1}, zero before the first token of a document."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.size = 2

    def reset_parameters(self) -> None:
        """There are none."""

    def both(self, x: Embedded, past: TokenContext) -> Tensor:
        """x_{t-1} and x_t, ``[b t 2 d]``."""
        return torch.stack([self(x, past), x], 2)

    def _convolve(
        self,
        past: TokenContext,
        tail: Tensor,
        x: Tensor,
        document: Tensor | None,
        bias: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        seen = torch.cat([tail, x], dim=1)
        past.save_tail(self.name, seen[:, -1:])
        if document is None:
            return seen[:, :-1]
        return seen[:, :-1].masked_fill((document[:, 1:] != document[:, :-1])[..., None], 0)


class TokenShifts(PreviousToken):
    """Several token shifts of one input: x_t + μ_i ⊙ (x_{t-1} - x_t) (RWKV-7 eq. 3)."""

    def __init__(self, d: int, count: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(count, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.mu, 0.5)

    def shifts(self, x: Embedded, past: TokenContext) -> list[Tensor]:
        """x as each μ shifts it."""
        back = self(x, past) - x
        return [torch.addcmul(x, back, mu) for mu in self.mu]


def _take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """``[b s d]`` at ``[b t]``; take_along_dim would make a graph one of these lengths alone."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
