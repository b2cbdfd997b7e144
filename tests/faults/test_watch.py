"""Whom a process that waits names, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastweights.runs.watch import Account, Sign, find_fault

PATIENCE, PAUSE = 100.0, 10.0
WAITS = Sign("here", 1, step=7, waits=True, updates=True)
TRAINS = Sign("there", 2, step=7, updates=True, place="Loop.update (runs/loop.py, line 9)")
PREPARES = replace(TRAINS, updates=False)


def hear(own: Sign, other: Sign | None, pauses: int, alive: bool, moves: bool) -> str | None:
    """What a process says of another, after some pauses in which that gave signs, or moved."""
    accounts = [Account(), Account()]
    for number in range(pauses):
        accounts[0].hear(replace(own, count=number), PAUSE)
        if other is not None:
            other = replace(other, count=number * alive, moves=number * moves)
        accounts[1].hear(other, PAUSE)
    return find_fault(0, accounts, PATIENCE)


@pytest.mark.parametrize(
    ("other", "alive", "moves", "said"),
    [
        (TRAINS, False, False, "process 1 (there, pid 2) has been silent for 110 s at step 7"),
        (PREPARES, False, False, "process 1 (there, pid 2) has been silent for 110 s at step 7"),
        (None, False, False, "process 1 has been silent for 120 s, from the beginning on"),
        (TRAINS, True, False, "process 1 (there, pid 2) has been in the update of step 7 for"),
        (TRAINS, True, True, None),
        (PREPARES, True, False, None),
        (WAITS, True, False, None),
    ],
)
def test_who_is_named(other, alive, moves, said):
    found = hear(WAITS, other, 12, alive, moves)
    assert (found is None) == (said is None)
    assert said is None or (found or "").startswith(said)
    assert hear(WAITS, other, 9, alive, moves) is None


def test_where_it_was_last_is_said():
    found = hear(WAITS, TRAINS, 12, alive=False, moves=False)
    assert (found or "").endswith("it was last seen in Loop.update (runs/loop.py, line 9)")


@pytest.mark.parametrize("own", [replace(WAITS, waits=False, updates=False), TRAINS])
def test_a_process_that_works_names_nobody(own):
    """It may be in an update as long as the other, which is not behind."""
    assert hear(own, TRAINS, 12, alive=True, moves=False) is None


def test_who_is_behind_by_a_step_is_named_from_within_an_update():
    own = replace(TRAINS, step=8)
    assert "step 7" in (hear(own, TRAINS, 12, alive=True, moves=False) or "")
