"""Opening the report of a target of `fastweights bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastweights.lab.bench.machine import Ceilings, Machine, commit, versions
from fastweights.lab.bench.report import Header, Report


def open_report(
    target: str,
    path: Path,
    settings: dict[str, Any],
    device: torch.device,
    listener: Callable[[dict[str, Any]], None],
    *,
    quick: bool,
) -> Report:
    """Open the report of `target` at `path`, a new one or one to resume.

    The machine's ceilings are measured when a report is new.
    """
    header = Header(target, commit(), asdict(Machine.here(device)), versions(), settings)
    return Report.open(
        path, header, lambda: asdict(Ceilings.measure_now(device, quick=quick)), listener
    )
