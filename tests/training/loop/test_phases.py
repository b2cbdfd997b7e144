"""How far work beside the training has come: who is told, what is printed, how it stops."""

from __future__ import annotations

import io

import pytest

from fastweights.cli import plain_console
from fastweights.cli.progress import Bar, Lines
from fastweights.errors import Stopped
from fastweights.training.loop import processes
from fastweights.training.loop.processes import LOOKS, Alone
from fastweights.training.loop.report import Reporter, Reporters, WorkDone, follow
from killable_runs import Heard


def test_every_piece_is_told() -> None:
    heard = Heard()
    assert list(follow("abc", "reading", Reporters([heard]))) == ["a", "b", "c"]
    assert [phase.done for phase in heard.phases] == [0, 1, 2, 3]
    assert {(phase.what, phase.total) for phase in heard.phases} == {("reading", 3)}


def test_work_ends_before_the_piece_after_the_question() -> None:
    done, asked = list[int](), iter([False, False, True])
    with pytest.raises(Stopped):
        done.extend(follow(range(9), "reading", Reporter(), lambda: next(asked)))
    heard = Heard()
    pieces = follow(range(9), "reading", heard, lambda: len(heard.phases) == 2)
    with pytest.raises(Stopped):
        done.extend(pieces)
    assert done == [0, 1, 0, 1]


def test_a_validation_by_one_process_asks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    group = Alone().watched(lambda: len(heard.phases) >= 3, heard)
    assert len([*group.share(range(LOOKS))]) == LOOKS
    heard.phases.clear()
    monkeypatch.setattr(processes, "BETWEEN_QUESTIONS", 0.0)
    with pytest.raises(Stopped):
        list(group.share(range(LOOKS)))
    assert [phase.done for phase in heard.phases] == [0, 1, 2]
    assert heard.phases[0].what == "validating"


def test_lines_say_what_is_done_and_the_time_left_now_and_then() -> None:
    screen = io.StringIO()
    lines = Lines(plain_console(file=screen, width=100))
    for done, seconds in enumerate((0.0, 4.0, 11.0, 12.0, 21.0, 25.0)):
        lines.phase(WorkDone("ranking layers", done, 5, seconds))
    assert screen.getvalue() == (
        "ranking layers: 2 of 5, 0:00:16 left\nranking layers: 4 of 5, 0:00:05 left\n"
    )


def test_a_terminal_shows_one_bar_at_a_time() -> None:
    screen = io.StringIO()
    console = plain_console(file=screen, force_terminal=True, width=100)
    with Bar(console) as bar:
        for done in range(3):
            bar.phase(WorkDone("placing [landmarks]", done, 2, float(done)))
        bar.note("placed")
        bar.phase(WorkDone("validating", 0, 2, 0.0))
    shown = screen.getvalue()
    assert "placing [landmarks]," in shown
    assert "placing [landmarks]," not in shown[shown.index("placed\n") :]
    assert "validating," in shown
