"""The memory of one device while a language model is trained: what a plan tells, and what refuses a
training that cannot fit."""

from __future__ import annotations

from dataclasses import dataclass

from fastweights.budget.devices import Accelerator
from fastweights.budget.footprint import Footprints, StepShape, trace
from fastweights.budget.operations import Parameters, count_by_part
from fastweights.models import FastWeightsConfig

FLOAT = 4
"""Bytes of a weight, a gradient and each of AdamW's two means."""
RESERVE = 0.08
"""Of an accelerator's memory: its own context, libraries' workspaces, and what fragments."""


@dataclass(frozen=True)
class Placing:
    """How a model and a step lie in the memory of devices.

    Attributes:
        devices: How many train together.
        shard: Whether they divide weights, gradients and the optimiser's means among them (FSDP2);
            else each has all (DDP).
        recompute: Whether blocks compute their inside again in the backward pass.
        bf16: Whether matrix products are in bfloat16.
    """

    devices: int = 1
    shard: bool = False
    recompute: bool = False
    bf16: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device, for each process that trains.

    Attributes:
        weights: In float32.
        optimizer: AdamW's two means.
        gradients: In float32.
        exchange: What devices exchange: DDP's buckets; under FSDP2 the whole weights and gradients
            of what is computed just then.
        activations: What the forward pass keeps for the backward pass, with autocast's copies of
            weights.
        loss: The most that logits and loss take at once.
        total: The most that is in use at once; not all of the above is at the same time.
    """

    weights: int
    optimizer: int
    gradients: int
    exchange: int
    activations: int
    loss: int
    total: int

    def excess(self, device: Accelerator) -> float:
        """Bytes that are too many for a device; negative if it fits."""
        return self.total - (1 - RESERVE) * device.memory


def device_memory(
    config: FastWeightsConfig,
    placing: Placing,
    device: Accelerator,
    sequences: int,
    length: int,
    accumulate: int = 1,
) -> DeviceMemory:
    """Compute the memory that training takes on each device.

    Args:
        config: The model.
        placing: How it lies on the devices.
        device: Each of them.
        sequences: Sequences that a device computes at once.
        length: Tokens of each.
        accumulate: Parts that a device's share of a batch is computed in.
    """
    parameters = count_by_part(config)
    everything = FLOAT * parameters.total
    share = everything // (placing.devices if placing.shard else 1)
    exchange = _exchange(parameters, placing)
    shape = StepShape(sequences, length, placing.bf16, placing.recompute)
    found = trace(config, shape, device)
    peak = max(_peak(found, placing, share, again) for again in {False, accumulate > 1})
    return DeviceMemory(
        weights=share,
        optimizer=2 * share,
        gradients=share,
        exchange=exchange,
        activations=found.kept,
        loss=max(found.head.forward, found.head.backward),
        total=3 * share + exchange + max(peak, share),
    )


def _peak(found: Footprints, placing: Placing, gradients: int, again: bool) -> int:
    """What a step takes beside what `_exchange` counts, gradients included.

    They are there from the beginning under FSDP2, and where they are added to `again`; weights that
    are gathered in bf16 need no copies.
    """
    if not placing.shard:
        return found.peak(gradients_exist=again) + (gradients if again else 0)
    copies = found.embedding.left + found.head.left + sum(part.left for part in found.of_layers)
    return found.peak(gradients_exist=True) - copies + gradients


def _exchange(parameters: Parameters, placing: Placing) -> int:
    """Two blocks gathered, one of which is on its way; embeddings are gathered once and stay, as do
    their gradients until the backward pass ends.
    """
    if placing.devices == 1:
        return 0
    if not placing.shard:
        return FLOAT * parameters.total
    block, gathered = parameters.largest_block, 2 if placing.bf16 else FLOAT
    return 2 * gathered * block + 2 * FLOAT * parameters.embedding
