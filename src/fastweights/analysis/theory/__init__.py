"""The papers' lemmas and propositions as programs: each returns its numbers, a verdict and a picture."""

from fastweights.analysis.theory.finding import Finding
from fastweights.analysis.theory.lemmas import (
    Embedding,
    ReversedSigmoid,
    TaylorSoftmax,
    embedding,
    reversed_sigmoid_transition,
    taylor_softmax,
)
from fastweights.analysis.theory.propositions import (
    Approximation,
    LeastParameters,
    Overwriting,
    Solution,
    approximation,
    least_parameters,
    overwriting,
)

__all__ = [
    "Approximation",
    "Embedding",
    "Finding",
    "LeastParameters",
    "Overwriting",
    "ReversedSigmoid",
    "Solution",
    "TaylorSoftmax",
    "approximation",
    "embedding",
    "least_parameters",
    "overwriting",
    "reversed_sigmoid_transition",
    "taylor_softmax",
]
