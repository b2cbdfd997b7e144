"""The mixers that the general rule is for: each paper's recurrence, written as it stands there.

Papers that keep the state as values by keys (RWKV-7, DeltaProduct) are transcribed with it as they
have it; it is transposed to be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cases import normal
from fastweights.methods import Auto, Chunkwise, Parallel, Recurrent, evaluate
from fastweights.recurrence import DPLR, Delta, Recurrence, Substeps
from tolerances import array, assert_close

T, K, V, STEPS = 70, 6, 4, 2
Arrays = dict[str, np.ndarray]
Named = dict[str, Tensor]


def drawn() -> Named:
    """What the papers make their recurrences of, one head: unit keys, gates in (0, 1), strengths in
    (0, 2).
    """
    g = Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return normal(1, T, *shape, generator=g)

    return {
        "q": some(1, K),
        "k": F.normalize(some(1, K), dim=-1),
        "v": some(1, V),
        "beta": 2 * some(1, 1).sigmoid(),
        "log_alpha": F.logsigmoid(some(1, 1) + 1),
        "log_w": -0.606531 * some(1, K).sigmoid(),
        "kappa": F.normalize(some(1, K), dim=-1),
        "eta": some(1, K).sigmoid(),
        "d": some(1, 1).sigmoid(),
        "erase": some(1, K).sigmoid(),
        "write": some(1, V).sigmoid(),
        "M": 1 + some(1, K).square(),
        "ks": F.normalize(some(STEPS, 1, K), dim=-1),
        "vs": some(STEPS, 1, V),
        "betas": 2 * some(STEPS, 1, 1).sigmoid(),
    }


def kda(x: Arrays) -> np.ndarray:
    """Kimi Linear (2510.26692): S_t = (I - β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ."""
    S, o = np.zeros((K, V)), []
    for q, k, v, beta, log_w in zip(*(x[n] for n in ("q", "k", "v", "beta", "log_w")), strict=True):
        S = (np.eye(K) - beta * np.outer(k, k)) @ np.diag(np.exp(log_w)) @ S
        S = S + beta * np.outer(k, v)
        o.append(S.T @ q)
    return np.array(o)


def rwkv7(x: Arrays) -> np.ndarray:
    """RWKV-7 (2503.14456): wkv_t = wkv_{t-1} (diag(w_t) - κ̂_tᵀ (η_t ⊙ κ̂_t)) + v_tᵀ k_t, the state
    values by keys, read as wkv_t r_tᵀ.
    """
    S, o = np.zeros((V, K)), []
    names = ("q", "k", "v", "log_w", "kappa", "eta")
    for r, k, v, log_w, kappa, eta in zip(*(x[n] for n in names), strict=True):
        S = S @ (np.diag(np.exp(log_w)) - np.outer(kappa, eta * kappa)) + np.outer(v, k)
        o.append(S @ r)
    return np.array(o)


def gdn2(x: Arrays) -> np.ndarray:
    """GDN-2 (2605.22791): S_t = (I - k_tᵀ (b_t ⊙ k_t)) diag(α_t) S_{t-1} + k_tᵀ (w_t ⊙ v_t)."""
    S, o = np.zeros((K, V)), []
    names = ("q", "k", "v", "log_w", "erase", "write")
    for q, k, v, log_w, erase, write in zip(*(x[n] for n in names), strict=True):
        S = np.diag(np.exp(log_w)) @ S
        S = S - np.outer(k, (erase * k) @ S) + np.outer(k, write * v)
        o.append(q @ S)
    return np.array(o)


def comba(x: Arrays) -> np.ndarray:
    """Comba (2506.02475): S_t = α_t S_{t-1} + β_t k_tᵀ (v_t - p_t α_t S_{t-1}), p = d k, read by
    q - d p.
    """
    S, o = np.zeros((K, V)), []
    names = ("q", "k", "v", "beta", "log_alpha", "d")
    for q, k, v, beta, log_alpha, d in zip(*(x[n] for n in names), strict=True):
        S, p = np.exp(log_alpha) * S, d * k
        S = S + beta * np.outer(k, v - p @ S)
        o.append((q - d * p) @ S)
    return np.array(o)


def pgdn(x: Arrays) -> np.ndarray:
    """PGDN (2604.21100): the gated delta rule with k ⊙ M for the key that writes."""
    S, o = np.zeros((K, V)), []
    names = ("q", "k", "v", "beta", "log_alpha", "M")
    for q, k, v, beta, log_alpha, M in zip(*(x[n] for n in names), strict=True):
        S = np.exp(log_alpha) * S
        S = S + 0.1 * beta * np.outer(k * M, v - k @ S)
        o.append(q @ S)
    return np.array(o)


def deltaproduct(x: Arrays) -> np.ndarray:
    """Gated DeltaProduct (2502.10297): H_{t,j} = (I - β_{t,j} k_{t,j} k_{t,j}ᵀ) H_{t,j-1} +
    β_{t,j} k_{t,j} v_{t,j}ᵀ from g_t H_{t-1}, read after the last.
    """
    S, o = np.zeros((K, V)), []
    names = ("q", "ks", "vs", "betas", "log_alpha")
    for q, ks, vs, betas, log_alpha in zip(*(x[n] for n in names), strict=True):
        S = np.exp(log_alpha) * S
        for j in range(STEPS):
            k, v, beta = ks[j, 0], vs[j, 0], betas[j, 0]
            S = (np.eye(K) - beta * np.outer(k, k)) @ S + beta * np.outer(k, v)
        o.append(S.T @ q)
    return np.array(o)


RULES: dict[str, tuple[Callable[[Named], Recurrence], Callable[[Arrays], np.ndarray]]] = {
    "KDA as Delta": (lambda x: Delta(x["q"], x["k"], x["v"], x["beta"], x["log_w"]), kda),
    "KDA": (
        lambda x: DPLR(x["q"], x["beta"] * x["k"], x["v"], x["k"], None, x["log_w"]),
        kda,
    ),
    "RWKV-7": (
        lambda x: DPLR(
            x["q"], x["k"], x["v"], x["kappa"], x["eta"] * x["kappa"], x["log_w"], before=True
        ),
        rwkv7,
    ),
    "GDN-2": (
        lambda x: DPLR(x["q"], x["k"], x["write"] * x["v"], x["erase"] * x["k"], None, x["log_w"]),
        gdn2,
    ),
    "Comba": (
        lambda x: DPLR(
            x["q"] - x["d"].square() * x["k"],
            x["beta"] * x["k"],
            x["v"],
            x["d"] * x["k"],
            x["beta"] * x["k"],
            x["log_alpha"],
        ),
        comba,
    ),
    "PGDN": (
        lambda x: DPLR(
            x["q"], 0.1 * x["beta"] * x["k"] * x["M"], x["v"], x["k"], None, x["log_alpha"]
        ),
        pgdn,
    ),
    "DeltaProduct": (
        lambda x: Substeps.of(x["q"], x["betas"] * x["ks"], x["vs"], x["ks"], None, x["log_alpha"]),
        deltaproduct,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_papers_recurrence_is_a_case_of_the_rule(name: str) -> None:
    rule, paper = RULES[name]
    streams = drawn()
    want = paper(
        {n: array(s)[0, :, 0] if s.dim() == 4 else array(s)[0] for n, s in streams.items()}
    )
    for method in (Recurrent(), Chunkwise(16), Parallel(), Auto()):
        o, _ = evaluate(rule(streams), method=method)
        assert_close(o[0, :, 0], want, f"o of {method}")
    single = {n: s.float() for n, s in streams.items()}
    assert_close(evaluate(rule(single))[0][0, :, 0], want, "o in float32", torch.float32)
