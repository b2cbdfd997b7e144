"""The targets of `fastweights bench`, each as one call that fills a report."""

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
    """The report of `target` at `path`, begun or gone on with; ceilings are measured when it is
    begun.
    """
    header = Header(target, commit(), asdict(Machine.here(device)), versions(), settings)
    return Report.open(
        path, header, lambda: asdict(Ceilings.measure_now(device, quick=quick)), listener
    )
