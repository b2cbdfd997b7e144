"""Diagonal linear systems h' = A h + B u in continuous time, and how they are held from one token
to the next.

Complex parameters are real pairs ``[… 2]``: optimisers, `.double()` and safetensors mishandle
complex ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastweights.layers import WideParameters, bounded_exp, upcast
from fastweights.recurrence.base import ShapeError

Start = Callable[[int], Tensor]
Hold = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class DiagonalSystem(WideParameters):
    """The diagonal A and the steps Δ of a state space model, with parameters that are real.

    A = -e^(log_A_re) + i A_im, Δ = e^(log_Delta), log-uniform in [0.001, 0.1] initially. Called,
    the module gives log Ā and what B is multiplied with, both complex.

    Args:
        shape: The shape ``[channels N]`` of A; either may be 1.
        steps: The shape of Δ, which broadcasts with A.
        start: Makes the initial A ``[N]`` for N.
        hold: How u is held between two tokens: `zero_order` or `tustin`.
    """

    def __init__(
        self, shape: tuple[int, int], steps: tuple[int, int], start: Start, hold: Hold
    ) -> None:
        super().__init__()
        self.start, self.hold = start, hold
        self.log_A_re = nn.Parameter(torch.empty(shape))
        self.A_im = nn.Parameter(torch.empty(shape))
        self.log_Delta = nn.Parameter(torch.empty(steps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        A = self.start(self.A_im.shape[1])
        with torch.no_grad():
            nn.init.zeros_(self.log_A_re).add_((-A.real).log())
            nn.init.zeros_(self.A_im).add_(A.imag)
        nn.init.uniform_(self.log_Delta, math.log(1e-3), math.log(1e-1))

    def forward(self) -> tuple[Tensor, Tensor]:
        A = torch.complex(-bounded_exp(self.log_A_re), upcast(self.A_im))
        return self.hold(A, bounded_exp(self.log_Delta))


def zero_order(A: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """log Ā = ΔA,  B̄ = (e^(ΔA) - 1) / A · B: u stays as it is between two tokens."""
    z = step * A
    return z, expm1(z) / A


def tustin(A: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Ā = (1 + ΔA/2) / (1 - ΔA/2),  B̄ = Δ / (1 - ΔA/2) · B: the bilinear rule.

    |Ā|² = 1 + 2Δ Re A / |1 - ΔA/2|² keeps the digits of a slow decay, which a
    quotient near one would lose.
    """
    above, below = 1 + step * A / 2, 1 - step * A / 2
    log_modulus = torch.log1p(2 * step * A.real / (below.real.square() + below.imag.square())) / 2
    angle = torch.atan2(above.imag, above.real) - torch.atan2(below.imag, below.real)
    return torch.complex(log_modulus, angle), step / below


def expm1(z: Tensor) -> Tensor:
    """e^z - 1 of a complex z, with the digits of a small one."""
    real = torch.expm1(z.real) * z.imag.cos() - 2 * (z.imag / 2).sin().square()
    return torch.complex(real, z.real.exp() * z.imag.sin())


def linear_start(n: int) -> Tensor:
    """A_n = -½ + iπn (S4D-Lin)."""
    return torch.complex(torch.full((n,), -0.5), math.pi * torch.arange(n))


def inverse_start(n: int) -> Tensor:
    """A_n = -½ + i N/π (N / (2n + 1) - 1) for N = 2n pairs (S4D-Inv)."""
    whole = 2 * n
    return torch.complex(
        torch.full((n,), -0.5), whole / math.pi * (whole / (2 * torch.arange(n) + 1) - 1)
    )


def hippo_start(n: int) -> Tensor:
    """The n eigenvalues in the upper half plane of the normal part of HiPPO-LegS with 2n states
    (DSS, S5).
    """
    p = (torch.arange(2 * n, dtype=torch.float64) + 0.5).sqrt()
    skew = torch.outer(p, p).triu(1)
    frequencies = torch.linalg.eigvalsh(1j * (skew - skew.mT))[n:]
    return torch.complex(torch.full((n,), -0.5), frequencies.float())


def hippo_low_rank(n: int) -> Tensor:
    """P of HiPPO-LegS with 2n states, A = Λ - P P* on the eigenvectors of its normal part, where Λ
    is `hippo_start`; its B is √2 P (S4).
    """
    p = (torch.arange(2 * n, dtype=torch.float64) + 0.5).sqrt()
    skew = torch.outer(p, p).triu(1)
    vectors = torch.linalg.eigh(-1j * (skew - skew.mT)).eigenvectors[:, n:]
    return (vectors.mH @ p.to(vectors.dtype)).to(torch.complex64)


def pairs(state: int) -> int:
    """How many conjugate pairs `state` states are."""
    if state < 2 or state % 2:
        raise ShapeError(
            f"state = {state}: complex states come in conjugate pairs; use an even number"
        )
    return state // 2


def heavy_tail(x: Tensor) -> Tensor:
    """1 + x, or 1 / (1 - x) where x < 0: above 0, and as x decreases towards it slower than e^x."""
    return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))


def as_complex(x: Tensor) -> Tensor:
    """Real pairs ``[… n 2]`` as ``[… n]``."""
    return torch.view_as_complex(upcast(x).contiguous())


def as_complex_channels(x: Tensor) -> Tensor:
    """``[… 2n]``, real and imaginary parts in turn, as ``[… n]``."""
    return as_complex(x.unflatten(-1, (-1, 2)))


def as_real(x: Tensor) -> Tensor:
    """``[… n]`` as ``[… 2n]``, real and imaginary parts in turn."""
    return torch.view_as_real(x).flatten(-2)
