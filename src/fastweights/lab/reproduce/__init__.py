"""The papers' claims, each of them one command: ``fastweights reproduce CLAIM``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from fastweights.lab.reproduce.claim import (
    Above,
    Claim,
    ClaimSize,
    ClaimVerdict,
    Experiment,
    Near,
    OtherSettings,
    Scale,
    Statement,
    Term,
    Trial,
    TrialContext,
)
from fastweights.lab.reproduce.claims import dsf, lolcats, mesanet, metala
from fastweights.lab.reproduce.exact_tests import ExactTest, Interval, exact_test
from fastweights.lab.reproduce.judge import Check, judge
from fastweights.lab.reproduce.measures import Measure, Measures, Sample
from fastweights.lab.reproduce.run import Outcome, reproduce

CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {**metala.CLAIMS, **lolcats.CLAIMS, **mesanet.CLAIMS, **dsf.CLAIMS}
)


def find_claim(name: str) -> Claim:
    """Return the claim of this name.

    Raises:
        ValueError: If there is none; the message suggests similar names.
    """
    if name not in CLAIMS:
        near = get_close_matches(name, CLAIMS, n=3, cutoff=0.4) or list(CLAIMS)
        raise ValueError(
            f"there is no claim {name!r}; did you mean {', '.join(near)}? All: fastweights"
            " reproduce"
        )
    return CLAIMS[name]


__all__ = [
    "CLAIMS",
    "Above",
    "Check",
    "Claim",
    "ClaimSize",
    "ClaimVerdict",
    "ExactTest",
    "Experiment",
    "Interval",
    "Measure",
    "Measures",
    "Near",
    "OtherSettings",
    "Outcome",
    "Sample",
    "Scale",
    "Statement",
    "Term",
    "Trial",
    "TrialContext",
    "exact_test",
    "find_claim",
    "judge",
    "reproduce",
]
