"""A recurrence seen as a linear time-varying system, as the Dynamical Systems Framework does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.transition import Transition
from fastweights.shapes import Map, Output


@dataclass(frozen=True, eq=False)
class DenseLTV:
    """A linear time-varying system in DSF's own dimensions, N = k·v (DSF eq. 15, 19).

    States are ordered channel by channel, as ``I_v ⊗ ·`` does.

    Attributes:
        A: Λ, ``[b t h N N]``.
        B: ``[b t h N u]``.
        C: ``[b t h y N]``.
        D: ``[b t h y u]``.
    """

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor

    def simulate(self, u: Tensor) -> Output:
        """Return y ``[b t h y]`` for the inputs ``u [b t h u]``, from the empty state (DSF eq.
        11)."""
        h, outputs = torch.zeros_like(self.B[:, 0, :, :, :1]), []
        for t in range(self.B.shape[1]):
            x = u[:, t, :, :, None].to(self.B.dtype)
            h = self.A[:, t] @ h + self.B[:, t] @ x
            outputs.append(self.C[:, t] @ h + self.D[:, t] @ x)
        return torch.stack(outputs, 1).squeeze(-1)

    def kernel(self) -> Tensor:
        """Return Φ ``[b h t s y u]``, a matrix for every pair of tokens (DSF eq. 12)."""
        b, length, heads, outputs, inputs = self.D.shape
        phi = self.D.new_zeros(b, heads, length, length, outputs, inputs)
        for s in range(length):
            # column s: Φ_ts = C_t A_t … A_{s+1} B_s, and D_s beside C_s B_s
            state = self.B[:, s]
            phi[:, :, s, s] = self.C[:, s] @ state + self.D[:, s]
            for t in range(s + 1, length):
                state = self.A[:, t] @ state
                phi[:, :, t, s] = self.C[:, t] @ state
        return phi

    def compose_input(self, W: Tensor) -> Self:
        """Return the system with the input W u for ``W [u d]``: B W and D W (DSF's B holds W_V)."""
        return replace(self, B=self.B @ W, D=self.D @ W)

    def join_heads(self) -> Self:
        """Return all heads as one system of block-diagonal matrices, ``h = 1`` (DSF eq. 28)."""
        return type(self)(*(block_diagonal(m) for m in (self.A, self.B, self.C, self.D)))


@dataclass(frozen=True, eq=False)
class LTV:
    """A linear time-varying system per head, with the inputs u = v (DSF eq. 11).

    h_t = A_t h_{t-1} + B_t u_t ;  y_t = C_t h_t + D_t u_t

    The v columns of the state share A, B and C, which are therefore kept without their ``I_v ⊗``.

    Attributes:
        A: A `Transition` of k rows.
        B: ``[b t h k]``.
        C: ``[b t h k]``.
        D: ``[b t h 1|v]``, or None.
    """

    A: Transition
    B: Tensor
    C: Tensor
    D: Tensor | None = None

    def __len__(self) -> int:
        return self.B.shape[1]

    def __getitem__(self, span: slice) -> Self:
        """Return the system of the tokens in `span`."""
        D = self.D if self.D is None or self.D.shape[1] == 1 else self.D[:, span]
        return replace(self, A=self.A[span], B=self.B[:, span], C=self.C[:, span], D=D)

    def heads(self, chosen: list[int]) -> Self:
        """Return the systems of the `chosen` heads."""
        D = self.D if self.D is None or self.D.shape[2] == 1 else self.D[:, :, chosen]
        return replace(
            self, A=self.A.heads(chosen), B=self.B[:, :, chosen], C=self.C[:, :, chosen], D=D
        )

    def simulate(self, u: Tensor, state: Tensor | None = None) -> tuple[Output, Tensor]:
        """Return (y, h_T) for the inputs ``u [b t h v]``, by the recurrence."""
        b, length, h, width = self.B.shape
        if state is None:
            state = self.B.new_zeros(b, h, width, u.shape[-1])
        outputs = []
        for t in range(length):
            state = (
                self.A[t : t + 1].apply(state[:, None])[:, 0]
                + self.B[:, t, :, :, None] * u[:, t, :, None]
            )
            outputs.append((self.C[:, t, :, None] @ state).squeeze(-2))
        y = torch.stack(outputs, 1) if outputs else state.new_zeros(b, 0, h, u.shape[-1])
        return (y if self.D is None else y + self.D * u), state

    def kernel(self) -> Map:
        """Return Φ ``[b h t s]``: Φ_ts = C_t (∏_{j=s+1..t} A_j) B_s (+ D_t at t = s) (DSF eq. 12).

        Raises:
            ValueError: If D differs between value channels.
        """
        b, length, h, _ = self.B.shape
        # a value column for every s, whose response to an impulse at s is column s of Φ
        impulses = torch.eye(length, dtype=self.B.dtype, device=self.B.device)
        plain = replace(self, D=None)
        phi = plain.simulate(impulses[None, :, None].expand(b, length, h, length))[0].transpose(
            1, 2
        )
        if self.D is None:
            return phi
        if self.D.shape[-1] != 1:
            raise ValueError(
                "D differs between the value channels: Φ is not one map per head; use dense()"
            )
        return phi + torch.diag_embed(self.D.expand(b, length, h, 1).squeeze(-1).transpose(1, 2))

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of every A_t, ``[b t h k]``, without the zeros of rows that only
        delay (`DelayedTransition`)."""
        return self.A.eigenvalues()

    def memory_horizon(self) -> Tensor:
        """Return the tokens after which a state component has decayed to 1/e, -1/log|λ|: ``[b t h
        k]``; inf for |λ| = 1."""
        rate = self.eigenvalues().abs().log()
        return torch.where(rate == 0, torch.inf, -1 / rate)

    def dense(self, values: int) -> DenseLTV:
        """Return DSF's matrices with N = k·values: each of A, B, C is I_values ⊗ its shared
        factor."""
        b, length, h, _ = self.B.shape
        eye = torch.eye(values, dtype=self.B.dtype, device=self.B.device)
        skip = (
            torch.zeros(1, dtype=eye.dtype, device=eye.device)
            if self.D is None
            else self.D.to(eye.dtype)
        )
        return DenseLTV(
            A=kron(eye, self.A.dense()),
            B=kron(eye, self.B[..., :, None]),
            C=kron(eye, self.C[..., None, :]),
            D=torch.diag_embed(skip.expand(b, length, h, values)),
        )

    def extend(self, width: int) -> Self:
        """Return a system with the same input-output map and `width` ≥ k rows (DSF Lemma 2).

        The new rows are never read.

        Raises:
            ValueError: If `width` is less than k.
        """
        extra = width - self.B.shape[-1]
        if extra < 0:
            raise ValueError(
                f"cannot extend a state of {self.B.shape[-1]} rows to {width}: a state is"
                f" extended only upwards; take a width of at least {self.B.shape[-1]}"
            )
        return replace(
            self, A=self.A.extend(extra), B=F.pad(self.B, (0, extra)), C=F.pad(self.C, (0, extra))
        )


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Return a ⊗ b of the last two axes; the axes before broadcast."""
    product = a[..., :, None, :, None] * b[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2, -1)


def block_diagonal(m: Tensor) -> Tensor:
    """Return ``[b t h i j]`` as block-diagonal matrices ``[b t 1 h·i h·j]``."""
    heads = torch.eye(m.shape[2], dtype=m.dtype, device=m.device)
    blocks = m[:, :, :, :, None, :] * heads[:, None, :, None]
    return blocks.flatten(-2).flatten(2, 3)[:, :, None]
