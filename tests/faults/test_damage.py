"""Damage to files, folders and disks: the run recovers, or says in one line what to do, and then
comes to the same end, bit for bit."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastweights.cli.progress import Lines
from fastweights.training.language.language_model import LanguageModelStage
from fastweights.training.loop import processes
from fastweights.training.loop.json_lines import read_rows
from here import copy_run, run_here, train_words

NOBODY = 65534
LARGEST = (50, 300, 1_000, 3_000, 9_000, 12_000)
"""Bytes of a file up to which the disk has room."""


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def replace(_: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\nof something else\n"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": cut,
    "with a flipped bit": flip,
    "of something else": replace,
}
IGNORED = ("run.lock", "numerics.json")
"""Files of which the bytes decide nothing."""


@pytest.fixture(scope="module")
def half(undisturbed, tmp_path_factory) -> Path:
    """A run that was stopped after its third step."""
    out = tmp_path_factory.mktemp("half") / "run"
    shown = Lines.progress
    Lines.progress = lambda self, row: row["step"] == 3 and signal.raise_signal(signal.SIGTERM)
    try:
        assert undisturbed.run(out).status == 143
    finally:
        Lines.progress = shown
    return out


def files_of(out: Path) -> list[Path]:
    files = [path.relative_to(out) for path in sorted(out.rglob("*")) if path.is_file()]
    return [path for path in files if path.name not in IGNORED]


def damage_file(undisturbed, run: Path, path: Path, damage: str, out: Path) -> tuple[int, str]:
    """Damage one file of a copy of a run, and go on; how that ended, and what was said."""
    copy_run(run, out)
    sound = (out / path).read_bytes()
    (out / path).write_bytes(DAMAGES[damage](sound))
    said = undisturbed.run(out)
    if said.status:
        assert said.error.count("\n") == 1, said.error
        assert str(out) in said.error
        (out / path).write_bytes(sound)
        assert undisturbed.run(out).status == 0
    found = [name for name in undisturbed.outcome if not (out / name).exists()]
    assert not found
    if not _is_spare(run, path):
        assert undisturbed.equals(out), (path, damage)
    return said.status, said.error.replace(str(out), "RUN") or _note(said.out, out)


def _is_spare(run: Path, path: Path) -> bool:
    """Whether a file is of a checkpoint that a finished run would only need if its last is lost."""
    return path.parts[:2] == ("checkpoints", "step-00000004") and (run / "model").exists()


def _note(out: str, folder: Path) -> str:
    lines = [line for line in out.splitlines() if "damaged" in line or "missing" in line]
    return " ".join(lines).replace(str(folder), "RUN")


@pytest.mark.sampled
@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True], ids=["stopped", "finished"])
def test_a_damaged_file_of_a_run(undisturbed, half, tmp_path, told, whole):
    """Every fourth file; each damage in turn."""
    run = undisturbed.out if whole else half
    for number, path in enumerate(files_of(run)[whole::4]):
        damage = list(DAMAGES)[number % 3]
        told(
            f"{path} {damage}, of a {'finished' if whole else 'stopped'} run",
            *damage_file(undisturbed, run, path, damage, tmp_path / str(number)),
        )


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("whole", [False, True], ids=["stopped", "finished"])
def test_any_damaged_file_of_a_run(undisturbed, half, tmp_path, told, whole, damage):
    run = undisturbed.out if whole else half
    for number, path in enumerate(files_of(run)):
        told(
            f"{path} {damage}, of a {'finished' if whole else 'stopped'} run",
            *damage_file(undisturbed, run, path, damage, tmp_path / str(number)),
        )


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let no file become larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.sampled
@pytest.mark.parametrize("size", LARGEST)
def test_no_space_for_larger_files(undisturbed, tmp_path, told, size):
    with files_up_to(size):
        said = undisturbed.run(tmp_path / "out")
    assert said.status == 2
    assert said.error.count("\n") == 1
    assert "no space is left to write" in said.error
    assert not list(tmp_path.rglob("*.safetensors.partial"))
    assert undisturbed.run(tmp_path / "out").status == 0
    assert undisturbed.equals(tmp_path / "out")
    told(f"no file above {size} bytes", said.status, said.error.replace(str(tmp_path), ""))


def fail_at(monkeypatch, call: int) -> None:
    """Let the call of this number that makes something on disk final find no space."""
    calls = iter(range(call + 1))

    def sync(_: int) -> None:
        if next(calls, None) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)


@pytest.mark.parametrize("call", [0, 7, 19, 40])
def test_a_disk_that_becomes_full(undisturbed, tmp_path, told, call):
    _fill_disk_at(undisturbed, tmp_path / "out", told, call)


@pytest.mark.slow
@pytest.mark.parametrize("call", range(90))
def test_a_disk_that_becomes_full_at_any_write(undisturbed, tmp_path, told, call):
    _fill_disk_at(undisturbed, tmp_path / "out", told, call)


def _fill_disk_at(undisturbed, out: Path, told, call: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, call)
        said = undisturbed.run(out)
    assert said.status in (0, 2)
    assert ("no space is left" in said.error) == (said.status == 2), said.error
    assert undisturbed.run(out).status == 0
    assert undisturbed.equals(out)
    told(f"the disk is full at write {call}", said.status, said.error.replace(str(out), "RUN"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_small_disk(undisturbed, tmp_path, told):
    """A disk that grows until the run fits: what was written stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], check=True)
    try:
        for size in range(32, 4096, 32):
            said = undisturbed.run(disk / "run")
            if said.status == 0:
                break
            assert "no space is left" in said.error, said.error
            told(f"a disk of {size - 16} KiB", said.status, said.error.replace(str(disk), ""))
            grown = f"remount,size={size}k"
            subprocess.run(["mount", "-o", grown, str(disk)], check=True)
        assert undisturbed.equals(disk / "run")
    finally:
        gc.collect()  # what was begun in this process and failed may still list the disk
        subprocess.run(["umount", str(disk)], check=True)


@contextmanager
def only_readable(folder: Path, text: Path) -> Iterator[None]:
    """Let nothing in a folder be written, not by root either."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        for above in {*folder.parents, *text.parents}:
            above.chmod(above.stat().st_mode | 0o011)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("begun", [False, True], ids=["new", "stopped"])
def test_a_folder_that_cannot_be_written(undisturbed, half, tmp_path, told, begun):
    place = tmp_path / "place"
    place.mkdir()
    if begun:
        copy_run(half, place / "run")
    with only_readable(place, undisturbed.text):
        said = undisturbed.run(place / "run")
    assert said.status == 2
    assert said.error.count("\n") == 1
    assert "cannot write to" in said.error
    assert undisturbed.run(place / "run").status == 0
    assert undisturbed.equals(place / "run")
    told(
        f"a read-only folder, {'stopped' if begun else 'new'} run",
        said.status,
        said.error.replace(str(place), "PLACE"),
    )


def test_a_clock_that_jumps(undisturbed, half, tmp_path, told, monkeypatch):
    """Backwards by a day at every look, and files of the future and of the past."""
    out = copy_run(half, tmp_path / "run")
    for number, path in enumerate(path for path in out.rglob("*") if path.is_file()):
        os.utime(path, (4e9, 4e9) if number % 2 else (0, 0))
    now = time.time()
    looks = iter(range(1, 1 << 30))
    monkeypatch.setattr(time, "time", lambda: now - 86400 * next(looks))
    said = undisturbed.run(out)
    assert said.status == 0
    assert undisturbed.equals(out)
    seconds = [row["seconds"] for row in _rows(out)]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    told("a clock that jumps backwards", 0, "")


def _rows(out: Path) -> list[dict]:
    return read_rows(out / "metrics.jsonl")


def test_a_run_that_was_copied_elsewhere(undisturbed, half, tmp_path, told):
    out = copy_run(half, tmp_path / "another" / "place")
    assert undisturbed.run(out).status == 0
    assert undisturbed.equals(out)
    told("a folder copied elsewhere", 0, "")


def test_leftovers_of_a_dead_process(undisturbed, half, tmp_path, told):
    """A lock that nobody holds, and files and folders that were not finished."""
    out = copy_run(half, tmp_path / "run")
    assert (out / "run.lock").exists()
    (out / ".metrics.jsonl.partial").write_text("{")
    (out / "checkpoints" / ".step-00000004.partial").mkdir()
    (out / "checkpoints" / ".step-00000004.partial" / "model.safetensors").write_bytes(b"half")
    assert undisturbed.run(out).status == 0
    assert undisturbed.equals(out)
    assert not list(out.rglob("*.partial"))
    told("a lock and half a checkpoint left by a dead process", 0, "")


def test_the_text_is_damaged_after_it_was_read(undisturbed, half, tmp_path, told):
    out = copy_run(half, tmp_path / "run")
    sound, was = undisturbed.text.read_bytes(), undisturbed.text.stat()
    undisturbed.text.write_bytes(sound[: len(sound) // 2] + b"\xff")
    try:
        said = undisturbed.run(out)
    finally:
        undisturbed.text.write_bytes(sound)
        os.utime(undisturbed.text, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert said.status == 0
    assert "The text has changed since this run read it" in said.out
    assert undisturbed.equals(out)
    told("the text is damaged after it was read", 0, "The text has changed since …")


def test_a_foreign_folder_is_left_alone(undisturbed, tmp_path, told):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("chapter one")
    said = run_here(train_words(undisturbed.text, tmp_path / "run"))
    assert said.status == 2
    assert "is not a training run" in said.error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]
    told("a folder of something else", 2, said.error.replace(str(tmp_path), ""))


@pytest.mark.parametrize("step", [3, 6], ids=["in the middle", "last"])
def test_a_signal_while_it_validates(undisturbed, tmp_path, told, step):
    """The batch that is being computed is the last one."""
    out, first = tmp_path / "run", LanguageModelStage._read
    seen = []

    def read(self, batch):
        if not self.model.training and len(_rows(out)) == step - 1:
            seen.append(step)
            signal.raise_signal(signal.SIGTERM)
        return first(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModelStage, "_read", read)
        patch.setattr(processes, "BETWEEN_QUESTIONS", 0.0)
        said = undisturbed.run(out)
    assert said.status == 143
    assert len(seen) == 1
    assert [row["step"] for row in _rows(out)] == list(range(1, step))
    assert (out / "checkpoints" / f"step-{step:08d}").exists()
    assert not (out / "model").exists()
    assert undisturbed.run(out).status == 0
    assert undisturbed.run(out).status == 0
    assert undisturbed.equals(out)
    told("SIGTERM during a validation", 143, "Stopped … Run the same command again to resume.")
