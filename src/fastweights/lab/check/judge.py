"""Trying laws on a model, from small examples to large ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any

from fastweights.lab.check.laws import LAWS, Law
from fastweights.lab.check.questions import Example
from fastweights.lab.check.subject import NotTaken, Subject
from fastweights.models.continuation import tolerance_of
from fastweights.training.loop.checkpoint import no_progress_bars, no_warnings_of_transformers

REFUSALS = (ValueError, NotImplementedError)
"""What a model raises that says in words what it does not do; anything else is a mistake in it."""


class Verdict(Enum):
    """What a law's examples showed."""

    HOLDS = "holds"
    FAILS = "fails"
    REFUSED = "refused"
    NOT_ASKED = "not asked"


@dataclass(frozen=True)
class Finding:
    """A law and what the model does.

    Attributes:
        difference: the largest over all examples, or of the one that fails; None where nothing
            was compared
        example: the smallest that fails or is refused
        reason: what the model said when it refused, or why it was not asked
    """

    law: Law
    verdict: Verdict
    difference: float | None = None
    example: Example | None = None
    reason: str | None = None

    @property
    def is_breach(self) -> bool:
        """Whether a sound model would not have done that: a refusal in words is sound."""
        return self.verdict is Verdict.FAILS and self.law.required

    def record(self) -> dict[str, Any]:
        """As JSON has it; a difference that is not a number is null."""
        difference = self.difference
        return {
            "law": self.law.name,
            "says": self.law.says,
            "verdict": self.verdict.value,
            "breach": self.is_breach,
            "difference": difference if difference is None or isfinite(difference) else None,
            "example": None if self.example is None else str(self.example),
            "reason": self.reason,
        }


def check_model(
    model: Any,
    *,
    tokenizer: Any = None,
    tolerance: float | None = None,
    longest: int = 130,
    laws: Iterable[Law] = LAWS,
    watch: Callable[[Law], None] = lambda _: None,
) -> list[Finding]:
    """Try what holds of every sound causal language model, whatever its weights are.

    The model is left in evaluation mode and without gradients; its weights stay as they are.

    Args:
        model: a causal language model of transformers' interface
        tokenizer: the model's; without one, conversations are not asked about
        tolerance: of differences over the largest logit, where a law holds up to rounding; None
            for 1e-9 in float64, 1e-4 in float32, 0.1 in narrower types
        longest: leaves out examples with more tokens in a row
        laws: those to try
        watch: is told each law before it is tried

    Raises:
        ValueError: If the tolerance is not positive.
    """
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance {tolerance} is not positive")
    subject, found = Subject(model.eval(), tokenizer), []
    allowed = tolerance_of(model.dtype) if tolerance is None else tolerance
    with warnings.catch_warnings(), no_warnings_of_transformers(), no_progress_bars():
        warnings.simplefilter("ignore")
        for law in laws:
            watch(law)
            found.append(_judge(law, subject, allowed, longest))
    return found


def _judge(law: Law, subject: Subject, tolerance: float, longest: int) -> Finding:
    allowed, worst = tolerance if law.allowed is None else law.allowed, 0.0
    examples = [example for example in law.examples if example.longest <= longest]
    for example in examples:
        try:
            difference = law.difference(subject, example)
        except NotTaken as answer:
            return Finding(law, Verdict.NOT_ASKED, reason=str(answer))
        except REFUSALS as error:
            return Finding(law, Verdict.REFUSED, example=example, reason=_said(error))
        except Exception as error:  # a stranger's model may raise anything
            return Finding(law, Verdict.FAILS, example=example, reason=_said(error))
        if not difference <= allowed:
            return Finding(law, Verdict.FAILS, difference, example)
        worst = max(worst, difference)
    if not examples:
        return Finding(law, Verdict.NOT_ASKED, reason=f"its examples are longer than {longest}")
    return Finding(law, Verdict.HOLDS, worst)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
