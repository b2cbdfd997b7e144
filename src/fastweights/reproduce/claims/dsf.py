"""The Dynamical Systems Framework (Sieber et al., 2024)."""

from __future__ import annotations

from fastweights.reproduce.claim import Above, Claim, Near, Size, Term
from fastweights.reproduce.theory import Drawn, Theorem

PAPER = "DSF"


def _theorem(place: str, statement: str, *statements: Above | Near) -> Claim:
    source = f"DSF {place}"
    size = Size(Theorem(source), 0.1)
    return Claim(PAPER, place, statement, statements, "", size, size, size, Drawn(source))


def _error_of_map(order: int) -> Term:
    return Term("Taylor features", order, "error of the map")


THEORY = {
    "dsf-lemma1": _theorem(
        "Lemma 1",
        "Softmax attention is a linear system only with infinitely many state rows.",
        Above(_error_of_map(-1), 0),
        *(Above(_error_of_map(place), _error_of_map(place + 1)) for place in range(8)),
        *(Near(Term("rank of e^(x y)", place, "rank / points"), 1, 0) for place in range(4)),
    ),
    "dsf-lemma2": _theorem(
        "Lemma 2",
        "A system with a larger state reproduces every system with a smaller one.",
        *(Near(Term("larger state", place, "difference"), 0, 1e-12) for place in range(4)),
    ),
}

CLAIMS: dict[str, Claim] = {**THEORY}
