"""Work that several processes do together, by gloo, and what each of them says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

Report = dict[str, float]


def run_together(count: int, work: Callable[[], Report], folder: Path) -> Report:
    """The largest number that any of `count` processes reports under each name."""
    multiprocessing.set_forkserver_preload(["sliced_models"])  # imported once for all
    multiprocessing.start_processes(
        _take_part, (count, work, str(folder)), nprocs=count, start_method="forkserver"
    )
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    assert all(report.keys() == reports[0].keys() for report in reports)
    return {name: max(report[name] for report in reports) for name in reports[0]}


def _take_part(rank: int, count: int, work: Callable[[], Report], folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    try:
        report = work()
    finally:
        distributed.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over all processes."""
    summed = x.contiguous()
    raw: Any = torch.view_as_real(summed) if summed.is_complex() else summed
    distributed.all_reduce(raw)
    return summed
