"""How the processes of a training read a batch: each its own sequences, or slices of the same."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import TrainingError
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.loss import IGNORE_INDEX
from fastweights.parallel import HybridSharded, divide, use_method
from fastweights.training.loop.processes import Processes


class BatchReading:
    """Every process reads sequences of its own.

    Attributes:
        count: How many processes read slices of the same sequences, each of which computes its
            part of their mean loss.
    """

    count = 1

    def require_length(self, length: int) -> None:
        """Check that sequences of `length` tokens can be read so.

        Raises:
            TrainingError: If they cannot.
        """

    def require_model(self, model: nn.Module) -> None:
        """Check that `model` can read so.

        Raises:
            TrainingError: If it cannot.
        """

    def of(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which `model` goes forward and backward so."""
        return nullcontext()

    def own_part(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what this process reads of a batch."""
        return batch


class SlicedReading(BatchReading):
    """Neighbouring processes read slices of the same sequences, and hand states on.

    Args:
        processes: All processes.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes, self.count = processes, processes.together

    def require_length(self, length: int) -> None:
        if length % self.count:
            raise TrainingError(
                f"sequences of {length} tokens cannot be divided among {self.count} processes;"
                f" take a length of {length // self.count * self.count or self.count}"
            )

    def require_model(self, model: nn.Module) -> None:
        if not any(isinstance(part, FastWeightsForCausalLM) for part in model.modules()):
            raise TrainingError(
                f"a {type(model).__name__} cannot hand its states from process to process; only"
                " models of this library can (fastweights import makes them of some others)"
            )

    @cached_property
    def group(self) -> Any:
        """The processes that read slices of the same sequences; first asked for by all at once."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = self.processes.readers, self.count
        mesh = init_device_mesh(
            self.processes.device.type, shape, mesh_dim_names=("sequences", "time")
        )
        return mesh["time"].get_group()

    def of(self, model: nn.Module) -> AbstractContextManager[object]:
        return use_method(model, HybridSharded(self.group))

    def own_part(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return divide(_pad(batch, self.count), self.group)


def _pad(batch: Mapping[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """The batch with padding behind its tokens up to a multiple of tokens."""
    tokens = batch["input_ids"]
    missing = -tokens.shape[1] % multiple
    if not missing:
        return dict(batch)
    padded = {
        name: F.pad(x, (0, missing), value=IGNORE_INDEX if name == "labels" else 0)
        for name, x in batch.items()
    }
    return {**padded, "attention_mask": F.pad(torch.ones_like(tokens), (0, missing))}
