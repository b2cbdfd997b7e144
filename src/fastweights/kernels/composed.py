"""Recurrences made of recurrences, by the kernel of what they are made of."""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized


def normalized(recurrence: Normalized, state: State) -> tuple[Tensor, State]:
    """(o, state) from the inner record with its column of ones."""
    return recurrence.divided(run_fastest(recurrence.extended(), state))


def amplified(recurrence: Amplified, state: tuple[Tensor, Tensor]) -> tuple[Tensor, State]:
    """(o, state) from the rescaled record."""
    return recurrence.through(run_fastest, state)


def bonus(recurrence: Bonus, state: Tensor) -> tuple[Tensor, State]:
    """(o, state) from the plain rule, read one token behind."""
    o, after = run_fastest(recurrence.behind(), state)
    return recurrence.completed(o, state), after


def only_takes(kind: type[Recurrence]):
    """Refuses every record but those of one rule."""
    return lambda recurrence: (
        None
        if isinstance(recurrence, kind)
        else f"it is a {type(recurrence).__name__}, not a {kind.__name__}"
    )


NORMALIZED = Kernel("normalised: the inner record's kernel", only_takes(Normalized), normalized)
AMPLIFIED = Kernel("amplified: the rescaled record's kernel", only_takes(Amplified), amplified)
BONUS = Kernel("bonus: the plain rule's kernel, one token behind", only_takes(Bonus), bonus)
