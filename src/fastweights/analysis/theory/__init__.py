"""The papers' lemmas and propositions as programs: each returns its numbers, a verdict and a
picture."""

import torch
from torch import Tensor

from fastweights.analysis.theory.finding import TheoryFinding
from fastweights.analysis.theory.lemmas import (
    Embedding,
    ReversedSigmoid,
    TaylorSoftmax,
    embedding,
    reverse_sigmoid_transition,
    taylor_softmax,
)
from fastweights.analysis.theory.propositions import (
    Approximation,
    LeastParameters,
    MapConstruction,
    Overwriting,
    approximation,
    least_parameters,
    overwriting,
)
from fastweights.recurrence import Decay


def findings() -> list[TheoryFinding]:
    """Execute every statement, on small random inputs that are always the same."""
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    scores = 3 * drawn(16, 16)
    target = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1)
    system = Decay(
        drawn(1, 32, 2, 4), drawn(1, 32, 2, 4), drawn(1, 32, 2, 3), -drawn(1, 32, 2, 4).abs()
    ).ltv()
    overwritten, approximated = overwriting(drawn(4, 3), drawn(3)), approximation(target)
    return [
        taylor_softmax(
            0.7 * drawn(1, 32, 2, 2), 0.7 * drawn(1, 32, 2, 2), drawn(1, 32, 2, 4), tuple(range(9))
        ),
        embedding(system, drawn(1, 32, 2, 3), (4, 8, 16, 32)),
        reverse_sigmoid_transition(torch.linspace(-8, 8, 161, dtype=torch.float64)),
        overwritten,
        approximated,
        least_parameters(overwritten, approximated),
    ]


__all__ = [
    "Approximation",
    "Embedding",
    "LeastParameters",
    "MapConstruction",
    "Overwriting",
    "ReversedSigmoid",
    "TaylorSoftmax",
    "TheoryFinding",
    "approximation",
    "embedding",
    "findings",
    "least_parameters",
    "overwriting",
    "reverse_sigmoid_transition",
    "taylor_softmax",
]
