"""``python -m fastweights.cli``, as launchers start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fastweights.cli import main


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and end this process with its status.

    One of several processes that fails ends at once: what its threads wait for, such as a
    checkpoint that another process was to write with it, may never come.
    """
    status = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if status and "RANK" in os.environ:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
