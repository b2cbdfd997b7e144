"""The architectures as the Dynamical Systems Framework writes them: dense matrices of its equations
15 to 30.

Inputs are column vectors u_i, ``u [b t d]``; a weight matrix W maps them as W u_i does, as
`nn.Linear` stores it. The systems have one head that holds all channels, N = n·d. They exist to be
compared with, not to be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.layers import elu_plus_one
from fastweights.recurrence import DenseLTV
from fastweights.recurrence.ltv import block_diagonal, kron

C_RG_LRU = 8.0


def separable_attention(phi: Tensor, psi: Tensor, eta: Tensor, W_V: Tensor) -> DenseLTV:
    """Build the system of attention with a separable kernel and any normaliser (DSF eq. 15).

    Λ_i = (η_{i-1}/η_i) I_N, B_i = (1/η_i) (I_d ⊗ ψ(k_i)) W_V, C_i = I_d ⊗ φ(q_i)ᵀ, D_i = 0. Λ_0
    meets no state; it is I.

    Args:
        phi: Features of the queries, ``[b t n]``.
        psi: Features of the keys, ``[b t n]``.
        eta: Normaliser ``[b t]``, not 0.
        W_V: ``[v d]``.
    """
    b, t, n = psi.shape
    eye = torch.eye(W_V.shape[0], dtype=psi.dtype)
    ratio = torch.cat([eta[:, :1], eta[:, :-1]], 1) / eta
    return _system(
        A=ratio[..., None, None] * torch.eye(n * len(eye), dtype=psi.dtype),
        B=kron(eye, psi[..., :, None]) @ W_V / eta[..., None, None],
        C=kron(eye, phi[..., None, :]),
        D=psi.new_zeros(b, t, *W_V.shape),
    )


def linear_attention(u: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> DenseLTV:
    """Build the system of linear attention with φ = ψ = elu + 1 and η_i = φ(q_i)ᵀ Σ_{j≤i} ψ(k_j)
    (DSF eq. 16)."""
    phi, psi = elu_plus_one(u @ W_Q.mT), elu_plus_one(u @ W_K.mT)
    return separable_attention(phi, psi, (phi * psi.cumsum(1)).sum(-1), W_V)


def general_linear_attention(
    u: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, eta: Tensor
) -> DenseLTV:
    """Build the system of attention with linear φ and ψ and any normaliser η ``[b t]`` (DSF eq.
    17)."""
    return separable_attention(u @ W_Q.mT, u @ W_K.mT, eta, W_V)


def softmax_attention(u: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, order: int) -> DenseLTV:
    """Build the system of softmax attention with Taylor features up to `order` instead of all (DSF
    eq. 18).

    φ = ψ = `taylor_features`, η_i = Σ_j exp(q_iᵀ k_j).
    """
    q, k = u @ W_Q.mT, u @ W_K.mT
    eta = (q @ k.mT).exp().tril().sum(-1)
    return separable_attention(taylor_features(q, order), taylor_features(k, order), eta, W_V)


def taylor_features(x: Tensor, order: int) -> Tensor:
    """Compute x^{⊗p} / √p! for p ≤ order, so that φ(q)ᵀφ(k) = Σ_p (qᵀk)^p / p! (DSF eq. 24-25)."""
    power, features = torch.ones_like(x[..., :1]), []
    for p in range(order + 1):
        features.append(power / factorial(p) ** 0.5)
        power = (power[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat(features, -1)


def s6(u: Tensor, delta: Tensor, A: Tensor, W_B: Tensor, W_C: Tensor, D: Tensor) -> DenseLTV:
    """Build the system of S6, Mamba's layer (DSF eq. 19).

    Λ_i = exp(-(Δ_i ⊗ I_n) ⊙ A), B_i = Δ_i ⊗ (W_B u_i), C_i = I_d ⊗ (W_C u_i)ᵀ, D_i = diag(D).

    Args:
        u: Inputs ``[b t d]``.
        delta: The diagonal of Δ_i, ``[b t d]``.
        A: ``[d n]``, > 0.
        W_B, W_C: ``[n d]``.
        D: ``[d]``.
    """
    b, t, d = delta.shape
    return _system(
        A=torch.diag_embed((-delta[..., None] * A).exp().flatten(-2)),
        B=kron(torch.diag_embed(delta), (u @ W_B.mT)[..., :, None]),
        C=kron(torch.eye(d, dtype=u.dtype), (u @ W_C.mT)[..., None, :]),
        D=torch.diag_embed(D.expand(b, t, d)),
    )


def qlstm(u: Tensor, f: Tensor, i: Tensor, o: Tensor, W_u: Tensor) -> DenseLTV:
    """Build the system of the qLSTM with the gates f, i, o ``[b t d]`` (DSF eq. 20).

    Λ_i = diag(f_i), B_i = diag(i_i) W_u, C_i = diag(o_i), D_i = 0.
    """
    return _system(
        torch.diag_embed(f),
        i[..., :, None] * W_u,
        torch.diag_embed(o),
        u.new_zeros(*o.shape, u.shape[-1]),
    )


def rg_lru(r: Tensor, g: Tensor, A: Tensor) -> DenseLTV:
    """Build the system of the RG-LRU with the gates r and g (DSF eq. 21).

    a_i = exp(-c softplus(A) r_i), Λ_i = diag(a_i), B_i = diag(√(1 - a_i²) ⊙ g_i), C_i = I, D_i = 0.
    """
    a = (-C_RG_LRU * F.softplus(A) * r).exp()
    eye = torch.eye(a.shape[-1], dtype=a.dtype).expand(*a.shape, -1)
    return _system(
        torch.diag_embed(a),
        torch.diag_embed((1 - a.square()).sqrt() * g),
        eye,
        torch.zeros_like(eye),
    )


def reverse_sigmoid(x: Tensor, a: Tensor | float) -> Tensor:
    """Compute S6's transition σ(-x)^a, for x = W u + b and A = a I (DSF eq. 23)."""
    return (a * F.logsigmoid(-x)).exp()


def exponential_normaliser(u: Tensor, W_eta: Tensor) -> Tensor:
    """Compute the normaliser η_i = exp(W_η u_i), ``W_eta [d]`` (DSF eq. 22)."""
    return (u @ W_eta).exp()


def softplus_normaliser(u: Tensor, W_eta: Tensor) -> Tensor:
    """Compute the normaliser η_i = softplus(W_η u_i) (DSF eq. 29)."""
    return F.softplus(u @ W_eta)


def sigmoid_normaliser(u: Tensor, W_eta: Tensor) -> Tensor:
    """Compute the normaliser η_i = σ(W_η u_i) (DSF eq. 30)."""
    return (u @ W_eta).sigmoid()


def multi_head(heads: Sequence[DenseLTV]) -> DenseLTV:
    """Join heads into one system (DSF eq. 28).

    Every head reads the same u, has its own η in its own part of Λ, and writes its own part of y.
    """
    A, C = (
        block_diagonal(torch.cat(parts, 2))
        for parts in ([s.A for s in heads], [s.C for s in heads])
    )
    return DenseLTV(A, torch.cat([s.B for s in heads], 3), C, torch.cat([s.D for s in heads], 3))


def _system(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> DenseLTV:
    return DenseLTV(A=A[:, :, None], B=B[:, :, None], C=C[:, :, None], D=D[:, :, None])
