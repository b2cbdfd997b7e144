"""Recurrences made of recurrences, by the kernel of what they are made of."""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import State
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized
from fastweights.recurrence.selective import Selective
from fastweights.recurrence.signed import Signed


def compute_with_normaliser(recurrence: Normalized, state: State) -> tuple[Tensor, State]:
    """(o, state) from the inner record with its column of ones."""
    return recurrence.divide_output(run_fastest(recurrence.append_ones(), state))


def compute_with_gain(recurrence: Amplified, state: tuple[Tensor, Tensor]) -> tuple[Tensor, State]:
    """(o, state) from the rescaled record."""
    return recurrence.evaluate_with(run_fastest, state)


def compute_with_sign(recurrence: Signed, state: State) -> tuple[Tensor, State]:
    """(o, state) from the record whose signs are on its streams."""
    return recurrence.restore_signs(run_fastest(recurrence.without_signs(), state))


def compute_with_bonus(recurrence: Bonus, state: Tensor) -> tuple[Tensor, State]:
    """(o, state) from the plain rule, read one token behind."""
    o, after = run_fastest(recurrence.shift_queries(), state)
    return recurrence.complete_output(o, state), after


def compute_written_out(recurrence: Selective, state: Tensor) -> tuple[Tensor, State]:
    """(o, state) from the plain rule."""
    return run_fastest(recurrence.plain, state)


NORMALIZED = Kernel("normalised: the inner record's kernel", Normalized, compute_with_normaliser)
AMPLIFIED = Kernel("amplified: the rescaled record's kernel", Amplified, compute_with_gain)
SIGNED = Kernel("signed: the inner record's kernel", Signed, compute_with_sign)
BONUS = Kernel("bonus: the plain rule's kernel, one token behind", Bonus, compute_with_bonus)
SELECTIVE = Kernel("selective: the plain rule's kernel", Selective, compute_written_out)
