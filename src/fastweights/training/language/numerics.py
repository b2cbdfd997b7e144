"""What a run's numbers depend on besides its settings: recorded when it begins, compared later."""

from __future__ import annotations

import warnings
from pathlib import Path

from fastweights.kernels import numerics
from fastweights.training.loop.files import read_json, write_json

RECORD = "numerics.json"


def record_numerics(out: Path) -> None:
    """Write `kernels.numerics` of this process to ``numerics.json`` of a run's folder.

    Where the run was begun with other settings, a warning names them: it goes on, but no longer to
    the same bits.
    """
    record, here = out / RECORD, numerics()
    if not record.exists():
        write_json(record, here)
        return
    before = read_json(record)
    changed = [
        f"{key} was {before.get(key)}, is {value}"
        for key, value in here.items()
        if before.get(key) != value
    ]
    if changed:
        warnings.warn(
            f"{out} was begun with other numerics ({'; '.join(changed)}): it goes on, but not to"
            " the same bits",
            stacklevel=2,
        )
