"""The problems that are timed, at lengths that float64 on a CPU can follow: as a GPU runs the same
binaries for all lengths, these tests test what is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastweights.lab.bench.cases import RecurrenceCase
from fastweights.lab.bench.contenders import Case, Inputs, Sizes
from fastweights.lab.bench.problems import MAIN, MATRICES, PROBLEMS, SCANS, Problem
from fastweights.recurrence.dplr import DPLR


class Length(NamedTuple):
    """Of a batch."""

    sequences: int
    tokens: int


HEADS = {"whole": Length(1, 300), "in segments": Length(1, 2017)}
CHANNELS = {"whole": Length(8, 100), "in segments": Length(1, 300)}
"""Time in one piece, as in the batches that are timed, and cut, as in one long sequence."""


def main_problem(name: str) -> Problem:
    """The first of the timed problems of a case."""
    return next(problem for problem in PROBLEMS if problem.name == name)


def timed_sizes(case: Case, device: torch.device) -> Sizes:
    """Of the timed problem of the case or its kind; on a CPU in a GPU's place, a few of all."""
    sizes = main_problem(case.name).sizes if case.channels else MAIN
    return Sizes(1, 70, 2, *(min(n, 16) for n in sizes[3:])) if device.type == "cpu" else sizes


def short_sizes(case: Case, cut: str, device: torch.device) -> Sizes:
    """Those at which the case is timed, but few tokens."""
    length = (CHANNELS if case.channels else HEADS)[cut]
    return timed_sizes(case, device)._replace(b=length.sequences, t=length.tokens)


def _dplr(x: Inputs) -> DPLR:
    erased = (x["beta"] * x["k"]).to(x["k"].dtype)
    return DPLR(x["q"], x["k"], x["v"], erased, None, x["log_decay"])


def _dplr_case() -> RecurrenceCase:
    """What reads and what writes are streams of their own, with the draws of the delta rule."""
    delta = main_problem("delta vector").case
    assert isinstance(delta, RecurrenceCase)
    return RecurrenceCase("DPLR", delta.draws, _dplr, delta.token_flops)


TIMED: tuple[Case, ...] = (*(main_problem(name).case for name in MATRICES + SCANS), _dplr_case())
