"""The rules: what happens to a fast-weight state at every token."""

from fastweights.recurrence.base import NoFiniteFormError, Recurrence, ShapeError, State
from fastweights.recurrence.composed import Normalized, Signed
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.ltv import LTV, DenseLTV
from fastweights.recurrence.mesa import Mesa, SolverStatistics, condition_numbers, solver_statistics
from fastweights.recurrence.softmax import Softmax
from fastweights.recurrence.solvers import Cholesky, ConjugateGradient, ShermanMorrison, Solver, Unrolled

__all__ = [
    "LTV",
    "Cholesky",
    "ConjugateGradient",
    "Decay",
    "Delta",
    "DenseLTV",
    "Mesa",
    "NoFiniteFormError",
    "Normalized",
    "Recurrence",
    "ShapeError",
    "ShermanMorrison",
    "Signed",
    "Softmax",
    "Solver",
    "SolverStatistics",
    "State",
    "Unrolled",
    "condition_numbers",
    "solver_statistics",
]
