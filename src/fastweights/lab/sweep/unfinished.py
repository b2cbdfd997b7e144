"""The state of a long run that has not ended, in one file, from which the same run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.errors import CheckpointError
from fastweights.training.loop.files import atomic_file

INTERVAL = 300.0
"""Seconds between two states that are written; shorter runs begin again."""
_STATE = "state"


@dataclass(frozen=True)
class RunState:
    """A run after an evaluation.

    Attributes:
        numbers: Its updates, results and seconds so far, as JSON values.
        model, optimizer, random: Tensors of the model, the optimisers and the generators.
    """

    numbers: Mapping[str, Any]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]

    def write(self, path: Path) -> None:
        """Replace the file by this state, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = {name: part for name, part in vars(self).items() if name != "numbers"}
        tensors = {
            f"{part}/{name}": tensor.detach().clone().contiguous()
            for part, named in parts.items()
            for name, tensor in named.items()
        }
        with atomic_file(path) as new:
            save_file(tensors, new, {_STATE: json.dumps(self.numbers)})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the state of a run; None if it has none.

        Raises:
            CheckpointError: If the file is damaged.
        """
        if not path.exists():
            return None
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "random": {}}
        try:
            with safe_open(path, "pt") as file:
                numbers = json.loads(file.metadata()[_STATE])
                keys: list[str] = file.keys()
                for part, _, name in (key.partition("/") for key in keys):
                    parts[part][name] = file.get_tensor(f"{part}/{name}")
        except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); remove it, and the run begins again"
            ) from error
        return cls(numbers, **parts)


def generators(device: torch.device) -> dict[str, Tensor]:
    """Return the states of PyTorch's generators."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set PyTorch's generators to what `generators` returned, here or on another device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


class Timer:
    """Says when `INTERVAL` is over."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """Whether it is over, from when on another one begins."""
        over = time.monotonic() - self._since >= INTERVAL
        if over:
            self._since = time.monotonic()
        return over
