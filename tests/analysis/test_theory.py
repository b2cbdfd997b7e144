"""The papers' lemmas and propositions, as the analysis executes them, against loops of
their own.
"""

from __future__ import annotations

from dataclasses import replace
from math import factorial

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from cases import normal
from fastweights.analysis.theory import (
    TheoryFinding,
    approximation,
    embedding,
    least_parameters,
    overwriting,
    reverse_sigmoid_transition,
    taylor_softmax,
)
from fastweights.analysis.theory.propositions import _construct_streams, _without_queries
from fastweights.recurrence import Decay
from fastweights.render.plots import canvas, png
from tolerances import array, assert_close


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, generator=Generator().manual_seed(seed))


def softmax_map(t: int, scale: float = 3.0) -> Tensor:
    scores = scale * drawn(t, t)
    return scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def overwrite() -> TheoryFinding:
    return overwriting(drawn(4, 3), drawn(3, seed=1))


FINDINGS = {
    "lemma 1": lambda: taylor_softmax(
        drawn(1, 7, 2, 2), drawn(1, 7, 2, 2, seed=1), drawn(1, 7, 2, 3, seed=2), (0, 1, 2, 3)
    ),
    "lemma 2": lambda: embedding(system(), drawn(1, 5, 2, 3), (4, 6, 9)),
    "appendix I": lambda: reverse_sigmoid_transition(
        torch.linspace(-30, 30, 61, dtype=torch.float64)
    ),
    "A2.1": overwrite,
    "A2.2": lambda: approximation(softmax_map(9)),
    "A2.3": lambda: least_parameters(overwrite(), approximation(softmax_map(9))),
}
each_finding = pytest.mark.parametrize("name", FINDINGS)


def system():
    return Decay(
        drawn(1, 5, 2, 4),
        drawn(1, 5, 2, 4, seed=1),
        drawn(1, 5, 2, 3),
        -drawn(1, 5, 2, 4, seed=2).abs(),
    ).ltv()


@each_finding
@pytest.mark.usefixtures("pictures")
def test_every_statement_is_borne_out_and_drawn(name: str) -> None:
    finding = FINDINGS[name]()
    assert finding.verdict
    assert finding.source
    assert finding.statement
    assert len(finding.figures()) >= 3
    figure, axes = canvas()
    finding.draw(axes[0, 0])
    assert png(figure).startswith(b"\x89PNG")


def test_lemma_1_counts_features_and_errors() -> None:
    q, k, v = drawn(1, 7, 1, 2), drawn(1, 7, 1, 2, seed=1), drawn(1, 7, 1, 3, seed=2)
    found = taylor_softmax(q, k, v, (0, 1, 2, 3))
    assert found.features == (1, 3, 7, 15)
    scores = np.tril(array(q)[0, :, 0] @ array(k)[0, :, 0].T / np.sqrt(2))
    weights = np.tril(np.exp(scores))
    for order, error, of_map in zip(
        found.orders, found.score_errors, found.map_errors, strict=True
    ):
        truncated = np.tril(sum(scores**p / factorial(p) for p in range(order + 1)))
        assert_close(number(error), np.array(np.abs(truncated - weights).max()), "score error")
        maps = [w / w.sum(1, keepdims=True) for w in (truncated, weights)]
        assert_close(number(of_map), np.array(np.abs(maps[0] - maps[1]).max()), "map error")


def test_lemma_1_would_be_refuted_by_an_exact_truncation() -> None:
    found = FINDINGS["lemma 1"]()
    assert not replace(found, score_errors=(0.0,) * 4).verdict
    assert not replace(found, ranks=(2, 4, 8, 15)).verdict
    assert not replace(found, score_errors=tuple(2 * b for b in found.bounds)).verdict


def test_lemma_2_would_be_refuted_by_a_difference() -> None:
    assert not replace(FINDINGS["lemma 2"](), differences=(0.0, 1e-6, 0.0)).verdict


def test_proposition_1_by_hand() -> None:
    values, new = drawn(4, 3), drawn(3, seed=1)
    found = {a.model: a for a in overwriting(values, new, decay=0.9).attempts}
    v1 = array(values)[0]
    for model, alpha in (("no decay", 1.0), ("fixed decay", 0.9)):
        assert_close(number(found[model].row), np.array(np.linalg.norm(alpha * v1)), model)
        keys = np.linspace(-5, 5, 20_001)[:, None]
        rows = alpha * v1 + keys * array(new)
        nearest = np.linalg.norm(rows - array(new), axis=1).min()
        assert found[model].least <= nearest <= found[model].least + 1e-3
    for model in ("dynamic decay", "tied key 1 - α", "delta rule"):
        assert found[model].others == 0
        assert_close(number(found[model].row), np.array(0.0), model)


@pytest.mark.parametrize("theta", [0.0, 0.3, 0.5, 1.0])
def test_proposition_2_constructs_any_map(theta: float) -> None:
    target = softmax_map(11, scale=8.0)
    target[5, :3] = 0
    target[5] /= target[5].sum()
    q, k, alpha = _construct_streams(target, theta)
    assert_close(_loops(q, k, alpha), array(target), "map")
    assert (alpha >= 0).all()
    assert max(float(alpha.max()), float(k.abs().max()), float(q.max())) <= 1 + 1e-12
    if theta == 1:
        p = array(target)[7]
        want = [0.0] + [p[:s].sum() / p[: s + 1].sum() for s in range(1, 8)]
        assert_close(alpha[:8, 7], np.array(want), "α of eq. A16-A21")
        assert_close(k[:8, 7], 1 - np.array(want), "the tied key")


def test_signed_keys_draw_any_map_without_queries() -> None:
    """What Proposition A2.2 denies for (K, Λ_t); with keys ≥ 0 the map can only fall with t."""
    target = softmax_map(11)
    q, k, alpha = _without_queries(target)
    assert (q == 1).all()
    assert_close(_loops(q, k, alpha), array(target), "map")
    found = approximation(target)
    assert found.signed.exact
    assert found.monotone == pytest.approx(
        max(
            target[t, s] - target[r, s]
            for s in range(11)
            for r in range(s, 11)
            for t in range(r, 11)
        )
        / 2
    )


def test_proposition_2_is_refuted_by_unbounded_or_inexact_solutions() -> None:
    found = approximation(softmax_map(9))
    bad = [replace(found.solutions[0], key=2.0), replace(found.solutions[0], error=1e-3)]
    assert not any(replace(found, solutions=(one, *found.solutions[1:])).verdict for one in bad)


def test_proposition_3_names_the_choices() -> None:
    found = FINDINGS["A2.3"]()
    enough = {c.name for c in found.choices if c.sufficient}
    assert enough == {"Q, Λ_t", "Q, K, Λ_t", "K, Λ_t, signed k"}
    assert len(found.choices) == 12
    assert found.verdict
    assert {c.name for c in found.least} == {"Q, Λ_t", "K, Λ_t, signed k"}


def _loops(q: Tensor, k: Tensor, alpha: Tensor) -> Tensor:
    """P_ts = q_t · ((∏_{j=s+1..t} α_j) ⊙ k_s)."""
    q, k, alpha = map(array, (q, k, alpha))
    found = np.zeros((len(q), len(q)))
    for t in range(len(q)):
        for s in range(t + 1):
            found[t, s] = q[t] @ (np.prod(alpha[s + 1 : t + 1], axis=0) * k[s])
    return torch.as_tensor(found)
