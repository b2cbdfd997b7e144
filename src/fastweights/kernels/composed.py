"""Recurrences made of recurrences, by the kernel of what they are made of."""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized


def compute_with_normaliser(recurrence: Normalized, state: State) -> tuple[Tensor, State]:
    """(o, state) from the inner record with its column of ones."""
    return recurrence.divide_output(run_fastest(recurrence.append_ones(), state))


def compute_with_gain(recurrence: Amplified, state: tuple[Tensor, Tensor]) -> tuple[Tensor, State]:
    """(o, state) from the rescaled record."""
    return recurrence.evaluate_with(run_fastest, state)


def compute_with_bonus(recurrence: Bonus, state: Tensor) -> tuple[Tensor, State]:
    """(o, state) from the plain rule, read one token behind."""
    o, after = run_fastest(recurrence.shift_queries(), state)
    return recurrence.complete_output(o, state), after


def requires_type(kind: type[Recurrence]):
    """Refuses every record but those of one rule."""
    return lambda recurrence: (
        None
        if isinstance(recurrence, kind)
        else f"it is a {type(recurrence).__name__}, not a {kind.__name__}"
    )


NORMALIZED = Kernel(
    "normalised: the inner record's kernel", requires_type(Normalized), compute_with_normaliser
)
AMPLIFIED = Kernel(
    "amplified: the rescaled record's kernel", requires_type(Amplified), compute_with_gain
)
BONUS = Kernel(
    "bonus: the plain rule's kernel, one token behind", requires_type(Bonus), compute_with_bonus
)
