"""A recurrence seen as a linear time-varying system, as the Dynamical Systems Framework does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fastweights.shapes import Map, Output


class DenseLTV(NamedTuple):
    """One head's system in DSF's own dimensions, N = k·v: Λ ``[b t h N N]``, B ``[b t h N v]``,
    C ``[b t h v N]``, D ``[b t h v v]``."""

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


@dataclass(frozen=True, eq=False)
class LTV:
    """h_t = A_t h_{t-1} + B_t u_t ;  y_t = C_t h_t + D_t u_t            (DSF eq. 11), per head, u = v

    The v columns of the state share A, B and C, which are therefore kept without their ``⊗ I_v``:
    A  ``[b t h k]`` (diagonal) or ``[b t h k k]``;  B, C ``[b t h k]``;  D ``[b t h 1|v]`` or None.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None

    @property
    def diagonal(self) -> bool:
        return self.A.dim() == 4

    def transition(self, state: Tensor, t: int) -> Tensor:
        """A_t applied to ``state [b h k v]``."""
        if self.diagonal:
            return self.A[:, t, :, :, None] * state
        return self.A[:, t] @ state

    def simulate(self, u: Tensor, state: Tensor | None = None) -> tuple[Output, Tensor]:
        """(y, h_T) for the inputs ``u [b t h v]``, by the recurrence."""
        b, length, h, width = self.B.shape
        if state is None:
            state = self.B.new_zeros(b, h, width, u.shape[-1])
        outputs = []
        for t in range(length):
            state = self.transition(state, t) + self.B[:, t, :, :, None] * u[:, t, :, None]
            outputs.append((self.C[:, t, :, None] @ state).squeeze(-2))
        y = torch.stack(outputs, 1) if outputs else state.new_zeros(b, 0, h, u.shape[-1])
        return (y if self.D is None else y + self.D * u), state

    def kernel(self) -> Map:
        """Φ ``[b h t s]``: Φ_ts = C_t (∏_{j=s+1..t} A_j) B_s (+ D_t at t = s)     (DSF eq. 12)."""
        b, length, h, width = self.B.shape
        impulses = torch.eye(length, dtype=self.B.dtype, device=self.B.device)
        plain = replace(self, D=None)
        phi = plain.simulate(impulses[None, :, None].expand(b, length, h, length))[0].transpose(1, 2)
        if self.D is None:
            return phi
        if self.D.shape[-1] != 1:
            raise ValueError("D differs between the value channels: Φ is not one map per head; use dense()")
        return phi + torch.diag_embed(self.D.expand(b, length, h, 1).squeeze(-1).transpose(1, 2))

    def eigenvalues(self) -> Tensor:
        """The eigenvalues of every A_t, ``[b t h k]``."""
        return self.A if self.diagonal else torch.linalg.eigvals(self.A)

    def memory_horizon(self) -> Tensor:
        """Tokens after which a state component has decayed to 1/e, -1/log|λ|: ``[b t h k]``; inf for |λ| = 1."""
        return -1 / self.eigenvalues().abs().log()

    def dense(self, values: int) -> DenseLTV:
        """DSF's matrices with N = k·values: each of A, B, C is its shared factor ⊗ I_values."""
        b, length, h, width = self.B.shape
        eye = torch.eye(values, dtype=self.B.dtype, device=self.B.device)
        full = torch.diag_embed(self.A) if self.diagonal else self.A
        skip = torch.zeros(1, dtype=eye.dtype, device=eye.device) if self.D is None else self.D.to(eye.dtype)
        return DenseLTV(
            A=torch.einsum("bthij,uw->bthiujw", full, eye).reshape(b, length, h, width * values, width * values),
            B=torch.einsum("bthi,uw->bthiuw", self.B, eye).reshape(b, length, h, width * values, values),
            C=torch.einsum("bthi,uw->bthuiw", self.C, eye).reshape(b, length, h, values, width * values),
            D=torch.diag_embed(skip.expand(b, length, h, values)),
        )

    def extend(self, width: int) -> Self:
        """The same input-output map with `width` ≥ k state rows: the new ones are never read (DSF Lemma 2)."""
        extra = width - self.B.shape[-1]
        if extra < 0:
            raise ValueError(f"cannot extend a state of {self.B.shape[-1]} rows to {width}; only upwards")
        pad = torch.nn.functional.pad
        A = pad(self.A, (0, extra)) if self.diagonal else pad(self.A, (0, extra, 0, extra))
        return replace(self, A=A, B=pad(self.B, (0, extra)), C=pad(self.C, (0, extra)))
