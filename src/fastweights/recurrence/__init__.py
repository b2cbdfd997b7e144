"""The rules: what happens to a fast-weight state at every token."""

from fastweights.recurrence.base import NoFiniteFormError, Recurrence, ShapeError, State
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized
from fastweights.recurrence.convolution import LongConvolution
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.dplr import DPLR
from fastweights.recurrence.head_groups import HeadGroups
from fastweights.recurrence.kalman import Kalman
from fastweights.recurrence.loglinear import LogLinear
from fastweights.recurrence.ltv import LTV, DenseLTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.mesa import Mesa, SolverStatistics, condition_numbers, solver_statistics
from fastweights.recurrence.preconditioned import Preconditioned
from fastweights.recurrence.selective import Selective
from fastweights.recurrence.signed import Signed
from fastweights.recurrence.slots import Slots
from fastweights.recurrence.softmax import Softmax
from fastweights.recurrence.solvers import (
    Chebyshev,
    Cholesky,
    ConjugateGradient,
    ShermanMorrison,
    Solver,
    UnrolledSolver,
)
from fastweights.recurrence.substeps import Substeps
from fastweights.recurrence.transition import (
    DelayedTransition,
    DenseTransition,
    DiagonalTransition,
    ErasingTransition,
    RankOneTransition,
    ShiftRegister,
    Transition,
)
from fastweights.recurrence.ttt import TTT
from fastweights.recurrence.windowed import WindowedLinear
from fastweights.recurrence.windowed_rule import Windowed

__all__ = [
    "DPLR",
    "LTV",
    "TTT",
    "Amplified",
    "Bonus",
    "Chebyshev",
    "Cholesky",
    "ConjugateGradient",
    "Decay",
    "DelayedTransition",
    "Delta",
    "DenseLTV",
    "DenseTransition",
    "DiagonalTransition",
    "ErasingTransition",
    "HeadGroups",
    "Kalman",
    "LogLinear",
    "LongConvolution",
    "MatrixRule",
    "Mesa",
    "NoFiniteFormError",
    "Normalized",
    "Preconditioned",
    "RankOneTransition",
    "Recurrence",
    "Selective",
    "ShapeError",
    "ShermanMorrison",
    "ShiftRegister",
    "Signed",
    "Slots",
    "Softmax",
    "Solver",
    "SolverStatistics",
    "State",
    "Substeps",
    "Transition",
    "UnrolledSolver",
    "Windowed",
    "WindowedLinear",
    "condition_numbers",
    "solver_statistics",
]
