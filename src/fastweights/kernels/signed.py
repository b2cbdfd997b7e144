"""`Signed` through the inner record's kernel."""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.signed import Signed


def compute_with_sign(recurrence: Signed, state: State) -> tuple[Tensor, State]:
    """(o, state) from the record whose signs are on its streams."""
    return recurrence.restore_signs(run_fastest(recurrence.without_signs(), state))


def refuses(recurrence: Recurrence) -> str | None:
    return (
        None
        if isinstance(recurrence, Signed)
        else f"it is a {type(recurrence).__name__}, not a Signed"
    )


SIGNED = Kernel("signed: the inner record's kernel", refuses, compute_with_sign)
