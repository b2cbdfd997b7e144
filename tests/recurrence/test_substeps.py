"""Several rank-one steps per token: every property beside the loop over tokens and steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cases import METHODS, normal
from checks import as_tensors, check_states
from fastweights.methods import Auto, Chunkwise, Method, Recurrent, evaluate
from fastweights.recurrence import ShapeError, Substeps
from tolerances import array, assert_close, error

B, T, N, H, K, V = 2, 11, 3, 2, 4, 5
Streams = dict[str, Tensor]


def streams(decay: str = "scalar", tied: bool = True, t: int = T) -> Streams:
    """Of gated DeltaProduct, β up to 2; with keys apart if not `tied`."""
    g = Generator().manual_seed(t)
    k = F.normalize(normal(B, t, N, H, K, generator=g), dim=-1)
    beta = 2 * normal(B, t, N, H, 1, generator=g).sigmoid()
    q, v = normal(B, t, H, K, generator=g), normal(B, t, N, H, V, generator=g)
    named = {"q": q, "w": beta * k, "v": v, "a": k}
    if not tied:
        named["b"] = F.normalize(named["w"] + 0.2 * normal(*k.shape, generator=g), dim=-1)
    if decay != "none":
        width = {"scalar": 1}.get(decay, K)
        log_decay = F.logsigmoid(normal(B, t, H, width, generator=g))
        lost = torch.rand(B, t, H, width, generator=g) < 0.2
        named["log_decay"] = log_decay.masked_fill(lost & (decay == "resets"), -torch.inf)
    return named


def start() -> Tensor:
    return normal(B, H, K, V, generator=Generator().manual_seed(9))


def loop(named: Streams, state: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """S_{t,i} = S_{t,i-1} + w_{t,i}ᵀ v_{t,i} - b_{t,i}ᵀ (a_{t,i} S_{t,i-1}), S_{t,0} = diag(α_t)
    S_{t-1,n}; o_t = q_t S_{t,n}.
    """
    arrays = {name: array(s) for name, s in named.items()}
    q, w, v, a = (arrays[name] for name in "qwva")
    b, S = arrays.get("b", w), array(state).copy()
    o = np.zeros((*q.shape[:3], V))
    for i, t, h in np.ndindex(*q.shape[:3]):
        alpha = np.exp(arrays["log_decay"][i, t, h]) if "log_decay" in arrays else np.ones(1)
        S[i, h] = alpha[:, None] * S[i, h]
        for n in range(N):
            at = (i, t, n, h)
            S[i, h] = S[i, h] + np.outer(w[at], v[at]) - np.outer(b[at], a[at] @ S[i, h])
        o[i, t, h] = q[i, t, h] @ S[i, h]
    return o, S


each_tied = pytest.mark.parametrize("tied", [True, False])


@pytest.mark.parametrize("decay", ["none", "scalar", "vector", "resets"])
@each_tied
def test_substeps_are_the_loop(decay: str, tied: bool) -> None:
    named = streams(decay, tied)
    want, after = loop(named, start())
    for method in METHODS:
        o, final = evaluate(Substeps.of(**named), start(), method)
        assert_close(o, want, f"o of {method}")
        check_states(final, as_tensors(after), torch.float64)


@each_tied
def test_gradients_are_those_of_single_steps(tied: bool) -> None:
    def gradients(method: Method) -> list[Tensor]:
        named = {name: s.requires_grad_() for name, s in streams("vector", tied).items()}
        state = start().requires_grad_()
        o, final = evaluate(Substeps.of(**named), state, method)
        assert isinstance(final, Tensor)
        loss = (o * o.detach().cos()).sum() + final.square().sum()
        return list(torch.autograd.grad(loss, [*named.values(), state]))

    want = gradients(Recurrent())
    for method in (Chunkwise(4), Auto()):
        assert max(map(error, gradients(method), want)) < 1e-10


@each_tied
def test_padding_and_documents(tied: bool) -> None:
    named, ids = streams("vector", tied), torch.arange(T) // 4
    mask = torch.arange(T) % 3 != 1
    record = Substeps.of(**named)
    padded, packed = record.keep(mask.expand(B, T)), record.segments(ids.expand(B, T))
    kept, _ = loop({n: s[:, mask] for n, s in named.items()}, start())
    apart = [
        loop({n: s[:, ids == i] for n, s in named.items()}, start() if i == 0 else 0 * start())[0]
        for i in range(3)
    ]
    for method in (Recurrent(), Chunkwise(4), Auto()):
        assert_close(evaluate(padded, start(), method)[0][:, mask], kept, "o of what is kept")
        assert_close(
            evaluate(packed, start(), method)[0], np.concatenate(apart, 1), "o of documents"
        )


def test_views_are_those_of_tokens() -> None:
    named = streams("scalar", tied=False)
    record = Substeps.of(**named)
    whole, final = evaluate(record, start())
    left, between = evaluate(record[:4], start())
    right, end = evaluate(record[4:], between)
    assert_close(torch.cat([left, right], 1), whole, "o of slices")
    check_states(end, final, torch.float64)
    check_states(record.effect(Auto().evaluate).after(start()), final, torch.float64)
    values = named["v"].flatten(1, 2)
    o, _ = evaluate(record)
    weights = record.attention_map()
    assert weights.shape == (B, H, T, N * T)
    assert_close(torch.einsum("bhts,bshv->bthv", weights, values), o, "map @ v")
    simulated, _ = record.ltv().simulate(values)
    assert_close(simulated[:, N - 1 :: N], o, "o of the system of steps")
    silent = {n: s[:, -1:] * (n != "v") for n, s in named.items()}
    left_of_ones = loop(silent, torch.ones(B, H, K, V))[1]
    survives = record.surviving_state()
    assert survives is not None
    assert_close(survives.double(), left_of_ones, "what survives")


def test_every_token_has_as_many_steps() -> None:
    inner = Substeps.of(**streams()).inner
    with pytest.raises(ShapeError, match="give every token as many steps"):
        Substeps(inner, 2)


def two_points(ranks: int) -> Streams:
    g = Generator().manual_seed(ranks)
    return {
        "q": normal(B, T, ranks, H, K, generator=g),
        "k": normal(B, T, 2, ranks, H, K, generator=g),
        "v": normal(B, T, 2, ranks, H, V, generator=g),
        "log_decay": F.logsigmoid(normal(B, T, H, K, generator=g)),
    }


def loop_over_points(named: Streams, state: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """S_t = diag(α_t) (S_{t-1} + Σ_r k_{t,1,r}ᵀ v_{t,1,r}) + Σ_r k_{t,2,r}ᵀ v_{t,2,r}; o_{t,r} =
    q_{t,r} S_t, rank by rank.
    """
    q, k, v, log_decay = (array(named[name]) for name in ("q", "k", "v", "log_decay"))
    S, ranks = array(state).copy(), q.shape[2]
    o = np.zeros((B, T, H, ranks * V))
    for b, t, h in np.ndindex(B, T, H):
        S[b, h] += k[b, t, 0, :, h].T @ v[b, t, 0, :, h]
        S[b, h] *= np.exp(log_decay[b, t, h])[:, None]
        S[b, h] += k[b, t, 1, :, h].T @ v[b, t, 1, :, h]
        o[b, t, h] = (q[b, t, :, h] @ S[b, h]).reshape(-1)
    return o, S


@pytest.mark.parametrize("ranks", [1, 3])
def test_several_keys_of_one_decay_are_read_together(ranks: int) -> None:
    named = two_points(ranks)
    record = Substeps.two_point(**named)
    want, after = loop_over_points(named, start())
    for method in METHODS:
        o, final = evaluate(record, start(), method)
        assert_close(o, want, f"o of {method}")
        check_states(final, as_tensors(after), torch.float64)
    left, between = evaluate(record[:4], start())
    right, _ = evaluate(record[4:], between)
    assert_close(torch.cat([left, right], 1), want, "o of slices")
    check_states(record.effect(Auto().evaluate).after(start()), as_tensors(after), torch.float64)
    o, _ = evaluate(record)
    weights = record.attention_map()
    steps = record.inner.v.shape[1]
    assert weights.shape == (B, H, ranks * T, steps)
    assert steps == (3 * ranks - 1) * T
    read = torch.einsum("bhts,bshv->bthv", weights, record.inner.v).unflatten(1, (T, ranks))
    assert_close(read.transpose(2, 3).flatten(3), o, "map @ v")
    assert record.empty_output().shape == (B, 0, H, ranks * V)


@pytest.mark.parametrize("outputs", [0, 4])
def test_a_token_reads_by_its_own_steps(outputs: int) -> None:
    with pytest.raises(ShapeError, match="by one of its steps or more, and by all of them at most"):
        Substeps(Substeps.of(**streams()).inner, N, outputs)
