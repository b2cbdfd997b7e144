"""Processes that are killed, stopped, told to end: the run has the same end, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from here import outcome, train_words, write_text
from pairs import Pair
from running import LONGEST, Running, command, rows_of, wait_for

pytestmark = pytest.mark.long

MORE = ("--steps", "40", "--checkpoint-every", "5", "--eval-every", "20", "--schedule", "constant")
LAYOUTS = {"whole": MORE, "parts": (*MORE, "--shard")}
SURVIVORS = "another process of this run has"
"""What a process says that another one was killed beside, or on its way to the meeting."""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def ends(text, tmp_path_factory) -> dict[str, dict[str, object]]:
    """What two processes leave that nothing happens to, by layout."""
    folder = tmp_path_factory.mktemp("ends")
    found = {}
    for name, more in LAYOUTS.items():
        assert Pair(train_words(text, folder / name, *more), folder).end() == [0, 0]
        found[name] = outcome(folder / name)
    return found


def kill_at_random(
    text: Path, folder: Path, layout: str, seed: int, kills: int
) -> tuple[list[Path], list[str]]:
    """Kill one or both again and again, in as many runs as it takes; their folders, when all have
    come to their end, and what was said."""
    generator, said = random.Random(seed), []
    outs = [folder / "0"]
    longest = 3.0
    for _ in range(kills):
        if (outs[-1] / "model").exists():
            outs.append(folder / str(len(outs)))
        began = time.monotonic()
        pair = Pair([*train_words(text, outs[-1], *LAYOUTS[layout]), "--patience", "20"], folder)
        time.sleep(generator.uniform(0.0, longest))
        pair.send(signal.SIGKILL, *generator.choice([(0,), (1,), (0, 1)]))
        statuses = pair.end()
        assert all(status in (0, 2, -signal.SIGKILL, -signal.SIGABRT) for status in statuses)
        longest = max(longest, 1.2 * (time.monotonic() - began)) if statuses != [0, 0] else longest
        said += pair.errors
    for out in outs:
        assert Pair(train_words(text, out, *LAYOUTS[layout]), folder).end() == [0, 0]
    return outs, said


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_a_few_times(text, ends, tmp_path, told, layout):
    _kill(text, ends, tmp_path, told, layout, seed=1, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_a_hundred_times(text, ends, tmp_path, told, layout, seed):
    """Twenty times five kills; what of the text or a checkpoint was being written is random."""
    _kill(text, ends, tmp_path, told, layout, seed=100 + seed, kills=5)


def _kill(text, ends, folder: Path, told, layout: str, seed: int, kills: int) -> None:
    outs, said = kill_at_random(text, folder, layout, seed, kills)
    for out in outs:
        assert outcome(out) == ends[layout]
        assert not list(out.rglob("*.partial"))
    assert all(line.startswith(SURVIVORS) for line in said), said
    told(f"kill -9 of one or both, {kills} times, {layout}", -9, "; ".join(sorted(set(said))))


@pytest.mark.slow
def test_a_process_that_nobody_meets_says_so(text, tmp_path, told):
    pair = Pair([*train_words(text, tmp_path / "run", *MORE), "--patience", "2"], tmp_path)
    pair.send(signal.SIGKILL, 0)
    assert pair.end() == [-signal.SIGKILL, 2]
    (said,) = pair.errors
    assert said.startswith("another process of this run has not answered in time")
    told("kill -9 of one on its way to the other", 2, said)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_process_is_not_waited_for(text, ends, tmp_path, told, stopped):
    words = train_words(text, tmp_path / "run", *MORE)
    pair = Pair([*words, "--patience", "2"], tmp_path)
    wait_for(lambda: rows_of(tmp_path / "run") > 2)
    pair.send(signal.SIGSTOP, stopped)
    waiting = pair.ranks[1 - stopped]
    waiting.join(60)
    pair.send(signal.SIGKILL, stopped)
    assert pair.end()[1 - stopped] == 2
    (said,) = pair.errors
    assert said.startswith("another process of this run has not answered in time")
    assert Pair(words, tmp_path).end() == [0, 0]
    assert outcome(tmp_path / "run") == ends["whole"]
    told(f"kill -STOP of process {stopped}", 2, said)


@pytest.mark.slow
def test_two_runs_in_one_folder(text, ends, tmp_path, told):
    """From two launchers."""
    words = train_words(text, tmp_path / "run", *MORE)
    first = Pair(words, tmp_path)
    wait_for(lambda: rows_of(tmp_path / "run") > 0)
    first.send(signal.SIGSTOP, 0, 1)
    second = Pair(words, tmp_path / "second")
    assert second.end() == [2, 2]
    assert len(second.errors) == 1
    assert "another process trains in" in second.errors[0]
    first.send(signal.SIGCONT, 0, 1)
    assert first.end() == [0, 0]
    assert outcome(tmp_path / "run") == ends["whole"]
    told("two runs in one folder", 2, second.errors[0].replace(str(tmp_path), ""))


def hit(text: Path, folder: Path, how: str, *more: str) -> tuple[Running, int, float]:
    """Start by torchrun, and hit it in the middle; status and seconds to the end of all."""
    words = [*train_words(text, folder / "run", *MORE, "--steps", "100000"), *more]
    running = Running(command(words, processes=2), folder)
    wait_for(lambda: rows_of(folder / "run") > 10)
    began = time.monotonic()
    HITS[how](running)
    return running, running.end(), time.monotonic() - began


HITS = {
    "SIGTERM to the launcher": lambda run: run.kill(run.process.pid, number=signal.SIGTERM),
    "SIGTERM to all": lambda run: run.kill(*run.all(), number=signal.SIGTERM),
    "SIGTERM to one worker": lambda run: run.kill(run.worker(1), number=signal.SIGTERM),
    "kill -9 of one worker": lambda run: run.kill(run.worker(1)),
    "kill -9 of all": lambda run: run.kill(*run.all()),
    "kill -STOP of one worker": lambda run: run.kill(run.worker(1), number=signal.SIGSTOP),
}
SAVED = tuple(HITS)[:3]
"""After these, no step is lost."""


@pytest.mark.slow
@pytest.mark.parametrize("how", HITS)
def test_torchrun(text, tmp_path, told, how):
    running, status, seconds = hit(text, tmp_path, how, "--patience", "20")
    out = tmp_path / "run"
    steps = sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-????????"))
    if how in SAVED:
        assert seconds < 30
        assert steps[-1] >= rows_of(out)
    assert not running.all()
    end = str(steps[-1] + 3)
    words = [*train_words(text, out, *MORE), "--steps", end]
    assert Running(command(words, processes=2), tmp_path).end() == 0
    undisturbed = train_words(text, tmp_path / "undisturbed", *MORE)
    assert Pair([*undisturbed, "--steps", end], tmp_path).end() == [0, 0]
    ours, theirs = outcome(out), outcome(tmp_path / "undisturbed")
    assert ours["metrics.jsonl"] == theirs["metrics.jsonl"]
    assert ours["model/model.safetensors"] == theirs["model/model.safetensors"]
    told(how, status, " / ".join(running.errors))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_torchrun_starts_all_again(text, ends, tmp_path, told, number):
    """Its restarts and the time-out of torch's process group are all that this needs."""
    words = [*train_words(text, tmp_path / "run", *MORE), "--patience", "30"]
    running = Running(command(words, processes=2, restarts=1), tmp_path)
    wait_for(lambda: rows_of(tmp_path / "run") > 10)
    running.kill(running.worker(1), number=number)
    assert running.end(2 * LONGEST) == 0
    assert outcome(tmp_path / "run") == ends["whole"]
    told(f"{number.name} of a worker, --max-restarts 1", 0, " / ".join(running.errors))


@pytest.mark.slow
def test_a_single_process_ends_within_its_notice(text, tmp_path, told):
    """As the command that it is, in a process of its own."""
    words = train_words(text, tmp_path / "run", *MORE, "--steps", "100000")
    running = Running(command(words), tmp_path)
    wait_for(lambda: rows_of(tmp_path / "run") > 2)
    running.kill(running.process.pid, number=signal.SIGTERM)
    assert running.end() == 143
    step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert step == rows_of(tmp_path / "run")
    assert f"Stopped after step {step:,}" in running.out
    told("SIGTERM to a single process", 143, f"Stopped after step {step}. Run the same command …")
