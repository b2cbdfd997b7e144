"""The memory of a linear time-varying system: how long it lasts, what reaches it, in how many
dimensions.

Everything here works per head on K×K or K×window matrices; N×N is never formed. A window is a slice
of the system in time, and its map and factors come from running it on one impulse per token.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.methods import evaluate
from fastweights.recurrence import (
    LTV,
    Decay,
    DiagonalTransition,
    Mesa,
    Recurrence,
    condition_numbers,
    solver_statistics,
)
from fastweights.shapes import Map


def half_lives(system: LTV) -> Tensor:
    """Compute the tokens after which a state component has halved, at each token's rate: ``[b t h
    k]``.

    inf for |λ| = 1.
    """
    return log(2) * system.memory_horizon()


def map_and_input_factor(window: LTV) -> tuple[Map, Tensor]:
    """Compute a window's map Φ ``[b h t s]`` and factor Ψ ``[b h k s]``.

    Ψ is what an impulse at s leaves in the state at the window's end; Ψ Ψᴴ is the controllability
    Gramian. D is left out.
    """
    b, length, h, _ = window.B.shape
    impulses = torch.eye(length, dtype=window.B.dtype, device=window.B.device)
    phi, state = replace(window, D=None).simulate(
        impulses[None, :, None].expand(b, length, h, length)
    )
    return phi.transpose(1, 2), state


def output_factor(window: LTV) -> Tensor:
    """Compute Ω ``[b h k t]``: Ωᴴ S is the window's output for the state S before it and no input.

    Ω Ωᴴ is the observability Gramian.
    """
    b, length, h, width = window.B.shape
    read = window.C.new_zeros(b, h, width, length)
    for t in reversed(range(length)):
        # column t is C_tᴴ; A_tᴴ takes it, and those of later tokens, to before token t
        read[..., t] = window.C[:, t].conj()
        read = window.A[t : t + 1].apply_adjoint(read[:, None])[:, 0]
    return read


def controllability(window: LTV) -> Tensor:
    """Compute the Gramian Ψ Ψᴴ ``[b h k k]`` at the window's end: the states that unit inputs
    reach."""
    reached = map_and_input_factor(window)[1]
    return reached @ reached.mH


def observability(window: LTV) -> Tensor:
    """Compute the Gramian Ω Ωᴴ ``[b h k k]`` at the window's start: the energy of a state's future
    output."""
    read = output_factor(window)
    return read @ read.mH


def hankel(system: LTV, cut: int, length: int) -> Tensor:
    """Compute the descending singular values ``[b h k]`` of the map from past inputs to future
    outputs.

    They are those of Ωᴴ Ψ, from the triangular factors of both, so that small ones are not lost in
    squares.

    Args:
        system: The system.
        cut: The token between past and future.
        length: Number of inputs before `cut`, and of outputs after it.
    """
    past, future = system[max(0, cut - length) : cut], system[cut : cut + length]
    # Ψᴴ = Q R and Ωᴴ = Q' R' give Ωᴴ Ψ = Q' (R' Rᴴ) Qᴴ
    reached, read = (
        torch.linalg.qr(map_and_input_factor(past)[1].mH).R,
        torch.linalg.qr(output_factor(future).mH).R,
    )
    values = torch.linalg.svdvals(read @ reached.mH)
    return torch.nn.functional.pad(values, (0, system.A.width - values.shape[-1]))


def effective_dimension(singular_values: Tensor) -> Tensor:
    """Compute exp of the entropy of the normalised values, ``[… k]`` → ``[…]``.

    It is k if all values are equal, 1 if only one is not zero, and 0 for zeros.
    """
    total = singular_values.sum(-1, keepdim=True)
    share = torch.where(total > 0, singular_values / total, 0)
    dimension = torch.special.entr(share).sum(-1).exp()
    return torch.where(total.squeeze(-1) > 0, dimension, 0)


def log_gains(window: LTV) -> Tensor:
    """Compute the log of the descending singular values ``[b h k]`` of ∏ A_t over the window.

    They tell how gradients grow or vanish.
    """
    if isinstance(window.A, DiagonalTransition):
        logs = window.A.decay.abs().log().sum(1).expand(-1, -1, window.A.width)
        return logs.sort(-1, descending=True).values
    b, _, h, width = window.B.shape
    product = torch.eye(width, dtype=window.B.dtype, device=window.B.device).expand(b, h, -1, -1)
    for t in range(len(window)):
        product = window.A[t : t + 1].apply(product[:, None])[:, 0]
    return torch.linalg.svdvals(product).log()


def response(phi: Map) -> Tensor:
    """Compute the root mean square of Φ_ts over all tokens s, for every lag t - s: ``[b h
    lag]``."""
    power = phi.abs().square()
    return torch.stack(
        [power.diagonal(-lag, -2, -1).mean(-1) for lag in range(phi.shape[-1])], -1
    ).sqrt()


def normalisers(record: Recurrence) -> Tensor | None:
    """Return η_t ``[b t h]``, by which the output is divided (DSF eq. 15, 18).

    None for a rule that does not normalise, and for softmax in which some queries do not see all
    tokens before them.
    """
    found = record.normalisers()
    return None if found is None else found.squeeze(-1)


class LinearSystems(NamedTuple):
    """The linear systems of a Mesa layer at some tokens.

    Attributes:
        condition: Condition numbers ``[b cuts h]``.
        residual: Residuals ``[b cuts h]`` that the solver leaves.
    """

    condition: Tensor
    residual: Tensor


def linear_systems(record: Mesa, cuts: tuple[int, ...]) -> LinearSystems:
    """Return the systems of the last token before each of the ascending `cuts`."""
    gram = Decay(record.k, record.k, record.beta * record.k, record.log_decay)
    state, found, before = gram.initial_state(), [], 0
    for cut in cuts:
        # H before the last token ahead of the cut, whose own system is looked at
        _, state = evaluate(gram[before : cut - 1], state)
        token, before = record[cut - 1 : cut], cut - 1
        empty = token.initial_state()
        assert isinstance(state, Tensor)
        assert isinstance(empty, tuple)
        given = (state, *empty[1:])
        found.append((condition_numbers(token, given), solver_statistics(token, given).residual))
    return LinearSystems(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
