"""Run tests under valgrind's memcheck, and say what it finds in the compiled kernels:
`python tests/kernels/valgrind.py TEST …`. What it finds in other libraries is left to them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from fastweights.kernels.native.build import LIBRARY

# pytest's own handler of faults takes signals that valgrind needs.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
PYTEST += ["-W", "ignore::pytest.PytestConfigWarning"]  # the handler's own option is unknown then


def main(tests: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        memcheck = ["valgrind", "--quiet", "--num-callers=40", "--xml=yes", f"--xml-file={found}"]
        environment = {**os.environ, "PYTHONMALLOC": "malloc"}
        status = subprocess.run([*memcheck, *PYTEST, *tests], env=environment).returncode
        ours = list(errors(found))
    sys.stdout.write("\n\n".join([*ours, f"{len(ours)} errors in {LIBRARY.name}\n"]))
    return status or bool(ours)


def errors(found: Path) -> Iterator[str]:
    """What memcheck says of every access that a frame of our library made, with its frames.

    What threads hold while the process ends is no access, and not lost either.
    """
    for error in ElementTree.parse(found).iter("error"):
        frames, leaks = list(error.iter("frame")), error.findtext("kind", "").startswith("Leak_")
        if not leaks and any(frame.findtext("obj", "").endswith(LIBRARY.name) for frame in frames):
            what = error.findtext("what") or error.findtext("xwhat/text", "")
            yield "\n".join([what, *map(place, frames[:8])])


def place(frame: ElementTree.Element) -> str:
    where = f"{frame.findtext('file')}:{frame.findtext('line')}"
    return f"    {frame.findtext('fn')} ({where})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
