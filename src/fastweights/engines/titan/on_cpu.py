"""torchtitan's training on the CPU: ``torchrun -m fastweights.engines.titan.on_cpu …``.

torchtitan 0.3.0 takes CUDA where it finds no accelerator, and then ends in "Torch not compiled with
CUDA enabled". What it needs of a device is little, and stands in two names of one of its modules,
which this program sets before any other part of torchtitan reads them. Processes meet by gloo.
Of PyTorch it needs ``torch.distributed.set_timeout`` after the first step, which 2.14 has made of a
private function that earlier versions have.
"""

from __future__ import annotations

import platform
import resource
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torchtitan.tools import utils

from fastweights.models.size import machine_memory


class Processor:
    """What torchtitan asks of ``torch.cuda``, answered for a process on the CPU."""

    def set_device(self, device: object) -> None:
        """Nothing to choose: there is one."""

    def current_device(self) -> int:
        """The only one."""
        return 0

    def device_count(self) -> int:
        """One, whatever its number of cores."""
        return 1

    def synchronize(self) -> None:
        """Nothing runs beside the host."""

    def get_device_name(self, device: object) -> str:
        """The processor's architecture."""
        return platform.machine()

    def get_device_properties(self, device: object) -> Any:
        """The machine's memory, in bytes."""
        return SimpleNamespace(total_memory=machine_memory())

    def memory_stats(self, device: object) -> dict[str, int]:
        """The most memory that this process has held, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self) -> None:
        """A process's peak cannot be reset."""

    def empty_cache(self) -> None:
        """There is none."""


def use_cpu() -> None:
    """Have torchtitan train on the CPU; to be called before anything else of it is imported."""
    lent: Any = utils
    lent.device_type, lent.device_module = "cpu", Processor()
    meeting: Any = torch.distributed
    if not hasattr(meeting, "set_timeout"):
        meeting.set_timeout = distributed_c10d._set_pg_timeout


def main() -> None:
    """Train on the CPU with the arguments of the command line, which are torchtitan's."""
    use_cpu()
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
