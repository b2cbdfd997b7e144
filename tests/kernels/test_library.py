"""Where the compiled kernels are missing, the user is told: once, and how to get them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from extension import compiled
from fastweights import kernels
from fastweights.kernels.native import library
from fastweights.ops.normalization import rms_normalize
from fastweights.recurrence import Decay, Recurrence


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No extension, of which nothing has been said: where it would be."""
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "fastweights.so")
    library._announce_missing.cache_clear()
    return library.LIBRARY


def decay(**kind: object) -> Decay:
    q, k, v = torch.randn(3, 1, 5, 2, 4).to(**kind)  # type: ignore[call-overload]
    return Decay(q, k, v, None)


def notices(*records: Recurrence) -> list[str]:
    """What is said while kernels for these are chosen."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for record in records:
            assert "compiled" not in kernels.select(record).name
    assert {one.category for one in said} <= {kernels.MissingKernelsWarning}
    return [str(one.message) for one in said]


@pytest.mark.usefixtures("missing")
def test_it_is_said_once_and_says_how_to_get_them() -> None:
    assert notices(decay(), decay()) == [
        "fastweights runs without its compiled kernels, slower: no C compiler was found when it was"
        " installed. To get them, install a C compiler (gcc or clang) and run `python -m"
        " fastweights.kernels.native`, or install the package again, by `pip install"
        " --no-cache-dir --force-reinstall --no-deps` and where it came from"
    ]


def test_a_library_that_does_not_load_is_named(missing: Path) -> None:
    missing.write_bytes(b"not a library")
    [said] = notices(decay())
    assert f"they are built for another machine ({missing}: " in said


@compiled
def test_a_library_of_other_sources_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_hash", lambda: 0)
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    library._announce_missing.cache_clear()
    [said] = notices(decay())
    assert "they are of other sources" in said


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("kind", [{"dtype": torch.float64}, {"device": "meta"}], ids=str)
def test_nothing_is_said_of_what_c_would_not_take(kind: dict[str, object]) -> None:
    assert notices(decay(**kind)) == []


@pytest.mark.usefixtures("missing")
def test_operations_of_layers_say_it_as_well() -> None:
    with pytest.warns(kernels.MissingKernelsWarning):
        rms_normalize(torch.randn(2, 8), None, 1e-5)


@pytest.mark.usefixtures("missing")
def test_of_several_processes_the_first_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert notices(decay()) == []
    library._announce_missing.cache_clear()
    monkeypatch.setenv("RANK", "0")
    assert len(notices(decay())) == 1


PROGRAM = """
import torch, fastweights
from fastweights.kernels.native import library
library.library = lambda: None
mixer = fastweights.MIXERS["metala"](d=8)
print("imported")
mixer(torch.ones(1, 3, 8)), mixer(torch.ones(1, 3, 8))
"""


@pytest.mark.parametrize(("flags", "lines"), [((), 1), (("-W", "ignore:fastweights runs"), 0)])
def test_it_is_one_line_with_pythons_own_filters(flags: tuple[str, ...], lines: int) -> None:
    command = [sys.executable, *flags, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stderr.splitlines()
    assert done.stdout == "imported\n"
    assert len(said) == lines, said
    assert all("MissingKernelsWarning: fastweights runs without" in line for line in said)


def test_the_command_that_it_names_says_what_is_missing() -> None:
    command = [sys.executable, *library.BUILD_COMMAND.split()[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "CC": "/nonexistent/cc"}
    )
    assert done.returncode == 1
    assert done.stderr == (
        "CC=/nonexistent/cc: there is no command /nonexistent/cc; name another\n"
    )


OUT_OF_MEMORY = """
import resource, torch
from fastweights.kernels.native import library
from fastweights.ops.normalization import rms_normalize

torch.set_num_threads(1)
x = torch.ones(1, 1 << 24)
weight = torch.ones(1 << 24)
rms_normalize(x[:, :64].contiguous(), weight[:64], 1e-6)
pages = int(open("/proc/self/statm").read().split()[0])
bytes_of_x = 4 << 24
before = resource.getrlimit(resource.RLIMIT_AS)
room = pages * resource.getpagesize() + 2 * bytes_of_x  # for y, not for working space
resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
try:
    rms_normalize(x, weight, 1e-6)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, before)
print(float(rms_normalize(x, weight, 0.0)[0, -1]))
"""


@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="/proc and RLIMIT_AS")
def test_without_memory_a_kernel_raises_and_the_process_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=True
    )
    said, value = done.stdout.splitlines()
    assert said.startswith("fw_norm: no memory was left for a kernel's working space; read fewer")
    assert value == "1.0"
