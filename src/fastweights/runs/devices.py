"""Batches on the device that they are trained on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the batch's tensors on `device`; the host does not wait for a GPU to copy them."""
    return {name: _moved(tensor, device) for name, tensor in batch.items()}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # only from memory that the system cannot move does a GPU copy by itself
    return tensor.pin_memory().to(device, non_blocking=True)
