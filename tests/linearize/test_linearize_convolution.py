"""Convolutions of q and k in front of a rule (LAWCAT), and what a model with them can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from families import CONVOLVED, logits, padded, student, teacher
from fastweights.linearize import (
    linearize,
)
from fastweights.linearize.convert.convolution import QueryKeyConvolution, convolve_queries_and_keys
from fastweights.linearize.distill.recipes import RECIPES
from tolerances import error

GLA = CONVOLVED["gla, convolved"]


def literal(x: np.ndarray, taps: np.ndarray, keep: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Σ_j w_j x_{t-j} of the tokens of one document, padding left out, channel by channel."""
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in np.flatnonzero(keep[b]):
            own = [s for s in range(t + 1) if keep[b, s] and segments[b, s] == segments[b, t]]
            for j, s in enumerate(reversed(own[-len(taps) :])):
                out[b, t] += taps[len(taps) - 1 - j] * x[b, s]
    return out


def test_queries_and_keys_are_convolved_with_their_own_taps() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 9, h, 4, generator=draw, dtype=torch.double) for h in (4, 2))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :2], keep[1, 4] = False, False
    segments = torch.tensor([[0] * 5 + [1] * 4, [0] * 7 + [1] * 2])
    convolution = QueryKeyConvolution(24, 3).double()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            convolve_queries_and_keys(convolution, q, k, (), None, None), (q, k), strict=True
        )
    )
    with torch.no_grad():
        convolution.weight.copy_(torch.randn(3, 24, generator=draw, dtype=torch.double))
        found = convolve_queries_and_keys(convolution, q, k, (), keep, segments)
    given = (x.numpy() for x in (torch.cat([q.flatten(2), k.flatten(2)], 2),))
    want = literal(*given, convolution.weight.detach().numpy(), keep.numpy(), segments.numpy())
    kept = keep.numpy()
    np.testing.assert_allclose(found[0].flatten(2).numpy()[kept], want[kept][:, :16], atol=1e-12)
    np.testing.assert_allclose(found[1].flatten(2).numpy()[kept], want[kept][:, 16:], atol=1e-12)


def test_taps_begin_as_the_identity_and_count() -> None:
    """The recipe's are those of the other tests."""
    analog, inputs = RECIPES["lawcat"].analog, padded()
    assert analog == GLA
    begun, plain = (linearize(teacher(), one) for one in (analog, replace(analog, convolution=0)))
    assert torch.equal(logits(begun, inputs), logits(plain, inputs))
    shaken, plain = (student(analog=one) for one in (analog, replace(analog, convolution=0)))
    assert error(logits(plain, inputs), logits(shaken, inputs)) > 1e-2
