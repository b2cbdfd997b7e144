"""Compiles the C sources here into one shared library: `python -m fastweights.kernels.native`.

Only the standard library is used, because the build hook of the package runs this file before
anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "fastweights.so"
KERNELS = (  # those that take the compiler longest begin
    "matrix.c",
    "scan.c",
    "complex.c",
    "mesa.c",
    "windowed.c",
    "prefill.c",
    "attention.c",
    "convolution.c",
    "norm.c",
    "rotation.c",
    "pointwise.c",
    "product.c",
    "quantized.c",
    "bonus.c",
    "replay.c",
)
COMMON = ("pool.c", "dispatch.c")
MOST_AT_ONCE = 8
"""Compilers: one source takes an eighth of the time of all, and each takes memory."""
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=default",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
]
AVX2 = ["-mavx2", "-mfma", "-mprfchw", "-mf16c"]  # every processor with AVX2 has the last, too
X86 = {
    "avx2": AVX2,
    "avx512": [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"],
}


class BuildError(RuntimeError):
    """There is no compiler, or it failed."""


def compiler() -> list[str]:
    """The command of the C compiler: $CC, which may have arguments; if not set, the first of cc,
    gcc and clang that there is.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0]):
            return words
    if named:
        raise BuildError(f"CC={shlex.join(named)}: there is no command {named[0]}; name another")
    raise BuildError("no C compiler found (looked for cc, gcc, clang; name another by CC)")


def instruction_sets() -> dict[str, list[str]]:
    """Compiler flags of the variants of every kernel, by suffix."""
    x86 = X86 if platform.machine().lower() in ("x86_64", "amd64") else {}
    return {"portable": [], **x86}


def source_hash() -> int:
    """What tells the C code here from any other: 60 bits of its hash."""
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return int(digest.hexdigest()[:15], 16)


def compile_object(cc: list[str], source: str, flags: list[str], folder: str) -> str:
    handle, target = tempfile.mkstemp(".o", dir=folder)
    os.close(handle)
    done = subprocess.run(
        [*cc, *FLAGS, *flags, "-c", str(HERE / source), "-o", target],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(cc)} failed on {source}:\n{done.stderr}")
    return target


def build() -> Path:
    """Compile and link in place. Raises BuildError."""
    if os.name != "posix":
        raise BuildError("the extension needs POSIX threads")
    cc = compiler()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (k, [*flags, f"-DISA={isa}"])
            for k in KERNELS
            for isa, flags in instruction_sets().items()
        ]
        jobs += [(source, [f"-DSOURCES={source_hash()}"]) for source in COMMON]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_ONCE)) as pool:
            objects = list(pool.map(lambda job: compile_object(cc, job[0], job[1], folder), jobs))
        linked = Path(folder) / LIBRARY.name
        done = subprocess.run(
            [*cc, "-shared", "-pthread", *objects, "-o", str(linked), "-lm"],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise BuildError(f"linking failed:\n{done.stderr}")
        beside = LIBRARY.with_suffix(".new")
        shutil.copyfile(linked, beside)
        beside.replace(LIBRARY)
    return LIBRARY
