"""The rules: what happens to a fast-weight state at every token."""

from fastweights.recurrence.base import NoFiniteFormError, Recurrence, ShapeError, State
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.ltv import LTV, DenseLTV
from fastweights.recurrence.mesa import Mesa, SolverStatistics, condition_numbers, solver_statistics
from fastweights.recurrence.signed import Signed
from fastweights.recurrence.softmax import Softmax
from fastweights.recurrence.solvers import (
    Cholesky,
    ConjugateGradient,
    ShermanMorrison,
    Solver,
    Unrolled,
)
from fastweights.recurrence.transition import Delayed, Diagonal, Erasing, Full, Register, Transition
from fastweights.recurrence.windowed import WindowedLinear

__all__ = [
    "LTV",
    "Amplified",
    "Bonus",
    "Cholesky",
    "ConjugateGradient",
    "Decay",
    "Delayed",
    "Delta",
    "DenseLTV",
    "Diagonal",
    "Erasing",
    "Full",
    "Mesa",
    "NoFiniteFormError",
    "Normalized",
    "Recurrence",
    "Register",
    "ShapeError",
    "ShermanMorrison",
    "Signed",
    "Softmax",
    "Solver",
    "SolverStatistics",
    "State",
    "Transition",
    "Unrolled",
    "WindowedLinear",
    "condition_numbers",
    "solver_statistics",
]
