"""Algorithms that run linear time-varying systems, and which systems each can run (DSF section
3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.methods import Chunkwise, evaluate
from fastweights.recurrence import (
    DPLR,
    LTV,
    Decay,
    DelayedTransition,
    Delta,
    DiagonalTransition,
    ErasingTransition,
    RankOneTransition,
    ShiftRegister,
    Transition,
)
from fastweights.shapes import Output


class Algorithm(ABC):
    """A way to compute y from u; all algorithms that can run a system agree on the result.

    Attributes:
        name: Name of the algorithm.
    """

    name: str

    def refuses(self, system: LTV) -> str | None:
        """Return what the algorithm needs and `system` lacks, or None if it can run it."""
        del system
        return None

    @abstractmethod
    def cost(self, system: LTV) -> str:
        """Return the operations per head for T tokens and v value channels, with this system's
        k."""

    @abstractmethod
    def compute(self, system: LTV, u: Tensor) -> Output:
        """Compute y ``[b t h v]`` for ``u [b t h v]``, from the empty state."""


@dataclass(frozen=True)
class Sequential(Algorithm):
    """The recurrence itself: h_t = A_t h_{t-1} + B_t u_t, one token after the other."""

    name = "recurrence"

    def cost(self, system: LTV) -> str:
        factor = 2 if isinstance(system.A, DiagonalTransition) else 4
        return f"{factor * system.A.width}·v·T, in T steps"

    def compute(self, system: LTV, u: Tensor) -> Output:
        return system.simulate(u)[0]


@dataclass(frozen=True)
class KernelProduct(Algorithm):
    """The matrix product y = Φ u with Φ formed (DSF eq. 12), as attention computes it."""

    name = "kernel Φ"

    def cost(self, system: LTV) -> str:
        return f"({system.A.width} + v)·T²/2, in parallel"

    def compute(self, system: LTV, u: Tensor) -> Output:
        phi = LTV(system.A, system.B, system.C).kernel()
        y = torch.einsum("bhts,bshv->bthv", phi, u.to(phi.dtype).expand(*system.B.shape[:3], -1))
        return _add_skip(system, y, u)


@dataclass(frozen=True)
class AssociativeScan(Algorithm):
    """The parallel scan of S5 and Mamba.

    It combines (A, x) ∘ (A', x') = (A A', A x' + x) over all prefixes, in pairs of pairs.
    """

    name = "associative scan"

    def cost(self, system: LTV) -> str:
        k = system.A.width
        if isinstance(system.A, DiagonalTransition):
            return f"{4 * k}·v·T, in 2 log T rounds"
        return f"({k}³ + {2 * k}²·v)·T, in 2 log T rounds: products of A_t fill up"

    def compute(self, system: LTV, u: Tensor) -> Output:
        x = prefixes(system.A, system.B[..., None] * u[..., None, :])
        return _add_skip(system, (system.C[..., None, :] @ x).squeeze(-2), u)


@dataclass(frozen=True)
class ChunkwiseParallel(Algorithm):
    """The chunkwise algorithm: Φ inside chunks, and the state between them.

    So do flash linear attention, SSD and DeltaNet's WY form.

    Attributes:
        size: Tokens per chunk.
    """

    name = "chunkwise parallel"
    size: int = 64

    def refuses(self, system: LTV) -> str | None:
        match system.A:
            case DiagonalTransition(decay=decay) | RankOneTransition(decay=decay) if (
                decay.is_complex()
            ):
                return None
            case (
                DiagonalTransition(decay=decay)
                | ErasingTransition(decay=decay)
                | RankOneTransition(decay=decay)
            ) if bool((decay < 0).any()):
                return (
                    "a decay is negative, and has no real logarithm (the rule Signed carries its"
                    " sign apart)"
                )
            case DiagonalTransition() | RankOneTransition():
                return None
            case ErasingTransition(k=k, beta=beta):
                return (
                    None
                    if torch.equal(system.B, beta * k)
                    else "B is not β k: what is written is not what is erased"
                )
            case DelayedTransition():
                return (
                    "a query reads the state before its token is written (the rule Bonus shifts"
                    " queries instead)"
                )
            case ShiftRegister():
                return (
                    "a window's products have no short form here (the rule WindowedLinear has one"
                    " of its own)"
                )
            case _:
                return "products of full matrices A_t have no short form"

    def cost(self, system: LTV) -> str:
        return (
            f"({2 * system.A.width}·v + ({system.A.width} + v)·{self.size})·T, in T/{self.size}"
            " steps"
        )

    def compute(self, system: LTV, u: Tensor) -> Output:
        q, k = system.C, system.B
        match system.A:
            case DiagonalTransition(decay=decay):
                record = Decay(q, k, u, decay.log())
            case ErasingTransition(decay=decay, k=k, beta=beta):
                record = Delta(q, k, u, beta, decay.log())
            case RankOneTransition(decay=decay, a=a, b=b):
                # A = diag(α) - bᵀa: a reads the state as it is before the decay
                record = DPLR(q, k, u, a, b, decay.log(), before=True)
            case _:
                raise ValueError(f"{self.name} cannot run this system: {self.refuses(system)}")
        return _add_skip(system, evaluate(record, method=Chunkwise(self.size))[0], u)


@dataclass(frozen=True)
class FourierConvolution(Algorithm):
    """The convolution y = K * u with K_τ = C A^τ B, by the fast Fourier transform (S4, DSS, H3)."""

    name = "convolution (FFT)"

    def refuses(self, system: LTV) -> str | None:
        streams = {"B": [system.B], "C": [system.C], "A": _coefficients(system.A)}
        varying = [
            name
            for name, parts in streams.items()
            if not parts or any(not torch.equal(s, s[:, :1].expand_as(s)) for s in parts)
        ]
        return f"{', '.join(varying)} change over time" if varying else None

    def cost(self, system: LTV) -> str:
        return f"{system.A.width}·T + v·T·log T, in parallel"

    def compute(self, system: LTV, u: Tensor) -> Output:
        length = len(system)
        # K_τ, the response to an impulse at the first token
        impulse = torch.zeros(1, length, 1, 1, dtype=system.B.dtype, device=system.B.device)
        impulse[:, 0] = 1
        response, _ = LTV(system.A, system.B, system.C).simulate(
            impulse.expand(*system.B.shape[:3], 1)
        )
        # with as many zeros behind, so that nothing wraps around
        spectrum = torch.fft.fft(response, 2 * length, dim=1) * torch.fft.fft(u, 2 * length, dim=1)
        y = torch.fft.ifft(spectrum, dim=1)[:, :length]
        return _add_skip(system, y if system.B.is_complex() else y.real, u)


ALGORITHMS: tuple[Algorithm, ...] = (
    Sequential(),
    KernelProduct(),
    AssociativeScan(),
    ChunkwiseParallel(),
    FourierConvolution(),
)


@dataclass(frozen=True)
class AlgorithmSupport:
    """Whether an algorithm can run a system.

    Attributes:
        algorithm: The algorithm.
        refusal: The reason if it cannot; None if it can.
        cost: The number of operations if it can.
    """

    algorithm: Algorithm
    refusal: str | None
    cost: str


def algorithm_support(system: LTV) -> list[AlgorithmSupport]:
    """Return for every algorithm whether it can run `system`, judged by the system's structure."""
    return [AlgorithmSupport(a, a.refuses(system), a.cost(system)) for a in ALGORITHMS]


def _coefficients(transition: Transition) -> list[Tensor]:
    """What a transition that may be constant in time is made of; nothing of any other."""
    match transition:
        case DiagonalTransition(decay=decay):
            return [decay]
        case RankOneTransition(decay=decay, a=a, b=b):
            return [decay, a, b]
        case _:
            return []


def _add_skip(system: LTV, y: Tensor, u: Tensor) -> Output:
    return y if system.D is None else y + system.D * u


def prefixes(a: Transition, x: Tensor) -> Tensor:
    """Compute h_t = A_t h_{t-1} + x_t for all t, ``x [b t h k v]``, by a parallel scan.

    Neighbours are merged in pairs, the pairs are scanned recursively, and the results are spread
    back.
    """
    if x.shape[1] <= 1:
        return x
    even, odd = slice(0, x.shape[1] // 2 * 2, 2), slice(1, None, 2)
    later = slice(2, None, 2)
    h = x.clone()
    # two tokens are one with A_odd A_even and x_odd + A_odd x_even, whose states the odd ones have
    h[:, odd] = prefixes(a[odd].after(a[even]), x[:, odd] + a[odd].apply(x[:, even]))
    # an even token's state follows from that of the odd one before it
    h[:, later] += a[later].apply(h[:, odd][:, : x[:, later].shape[1]])
    return h
