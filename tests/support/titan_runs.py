"""Runs of torchtitan on the CPU whose every number is kept: ``torchrun titan_runs.py FOLDER``.

FOLDER/cases.json maps names of runs to torchtitan's arguments. Of each run, FOLDER/NAME.json has
the losses, FOLDER/NAME.safetensors the weights at its beginning and end, and
FOLDER/NAME.batches.R.safetensors what process R has read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """What torchtitan has done.

    Attributes:
        losses: Of every step, over all processes.
        norms: The gradient's, before it is clipped.
        first, last: All weights, by torchtitan's names.
        batches: ``input``, ``positions`` and ``labels`` of every step, of all processes.
        report: Parameters and operations per token, as torchtitan reports them.
    """

    losses: list[float]
    norms: list[float]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    batches: list[Batch]
    report: dict[str, int]


def run_titan(folder: Path, processes: int, cases: Mapping[str, list[str]]) -> dict[str, Run]:
    """Run torchtitan with each list of arguments, one after the other in the same processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    support = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, "--standalone", __file__, str(folder)],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": support,
            "HF_DATASETS_CACHE": str(folder / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    return {name: _read(folder, name, processes) for name in cases}


def _read(folder: Path, name: str, processes: int) -> Run:
    numbers = json.loads((folder / f"{name}.json").read_text())
    weights = load_file(folder / f"{name}.safetensors")
    first, last = (
        {n.removeprefix(when): w for n, w in weights.items() if n.startswith(when)}
        for when in ("first.", "last.")
    )
    shares = [load_file(folder / f"{name}.batches.{r}.safetensors") for r in range(processes)]
    whole = {key: torch.cat([share[key] for share in shares], 1) for key in shares[0]}
    steps = range(len(whole["input"]))
    batches = [{key: stream[step] for key, stream in whole.items()} for step in steps]
    return Run(numbers["losses"], numbers["norms"], first, last, batches, numbers["report"])


def main() -> None:
    from fastweights.engines.titan.on_cpu import use_cpu

    use_cpu()
    folder = Path(sys.argv[1])
    for name, arguments in json.loads((folder / "cases.json").read_text()).items():
        _train(folder, name, arguments)
    torch.distributed.destroy_process_group()


def _train(folder: Path, name: str, arguments: list[str]) -> None:
    import torchtitan.trainer
    from torchtitan.config import ConfigManager

    without_sleep: Any = SimpleNamespace(
        perf_counter=torchtitan.trainer.time.perf_counter, sleep=lambda seconds: None
    )
    torchtitan.trainer.time = without_sleep
    common = ["--dump_folder", str(folder / name), "--metrics.log_freq", "1"]
    trainer = ConfigManager().parse_args([*common, *arguments]).build()
    numbers, batches = _listen(trainer)
    first = _whole(trainer, "first.")
    trainer.train()
    trainer.close()
    last = _whole(trainer, "last.")
    rank = torch.distributed.get_rank()
    save_file(_stack(batches), folder / f"{name}.batches.{rank}.safetensors")
    if rank == 0:
        save_file({**first, **last}, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(numbers))


def _listen(trainer: Any) -> tuple[dict[str, Any], list[Batch]]:
    """What the trainer will log and read, from now on."""
    operations = trainer.metrics_processor.num_flops_per_token
    parameters = sum(p.numel() for p in trainer.model_parts[0].parameters())
    report = {"parameters": parameters, "operations": operations}
    numbers: dict[str, Any] = {"losses": [], "norms": [], "report": report}
    batches: list[Batch] = []
    log, read = trainer.metrics_processor.log, trainer.post_dataloading_process

    def keep_log(step: int, loss: float, worst: float, norm: float, **others: Any) -> None:
        numbers["losses"].append(loss)
        numbers["norms"].append(norm)
        log(step, loss, worst, norm, **others)

    def keep_batch(inputs: Batch, labels: Tensor) -> Any:
        batches.append({**inputs, "labels": labels})
        return read(inputs, labels)

    trainer.metrics_processor.log, trainer.post_dataloading_process = keep_log, keep_batch
    return numbers, batches


def _whole(trainer: Any, prefix: str) -> dict[str, Tensor]:
    weights = trainer.model_parts[0].state_dict()
    return {
        prefix + name: getattr(weight, "full_tensor", lambda w=weight: w)().detach().clone()
        for name, weight in weights.items()
    }


def _stack(batches: list[Batch]) -> Batch:
    return {key: torch.stack([batch[key] for batch in batches]) for key in batches[0]}


if __name__ == "__main__":
    main()
