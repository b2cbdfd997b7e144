"""A training in numbers, before it begins: operations, memory, exchange, time and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastweights.budget.decoding import Decoding, decoding
from fastweights.budget.devices import Accelerator
from fastweights.budget.memory import FLOAT, RESERVE, DeviceMemory, Placing, device_memory
from fastweights.budget.operations import (
    Parameters,
    TokenOperations,
    count_by_part,
    count_operations,
)
from fastweights.models import FastWeightsConfig
from fastweights.models.loss import LOGITS_AT_ONCE
from fastweights.ranges import divide_batch
from fastweights.render.units import bytes_in_words


@dataclass(frozen=True)
class Workload:
    """What is trained on what.

    Attributes:
        tokens: Tokens that are trained on.
        length: Tokens per sequence.
        batch: Sequences per update, over all devices.
        device: Each of the devices.
        placing: How the model lies on them.
        accumulate: Parts in which each device takes its share of a batch; None for as few as fit.
        utilization: The share of a device's peak at which operations run, those that are computed
            twice included.
        price: Of a device for an hour; None if nobody asks.
    """

    tokens: float
    length: int
    batch: int
    device: Accelerator
    placing: Placing = Placing()
    accumulate: int | None = None
    utilization: float = 0.4
    price: float | None = None

    @property
    def steps(self) -> int:
        """Updates until all tokens are seen; the last batch is a full one."""
        return -(-int(self.tokens) // (self.batch * self.length))

    def sequences_at_once(self, accumulate: int) -> int:
        """Sequences that a device computes at once.

        Raises:
            TrainingError: If the batch cannot be divided evenly.
        """
        return divide_batch(self.batch, self.placing.devices, accumulate)


@dataclass(frozen=True)
class TrainingPlan:
    """The numbers of a planned training.

    Attributes:
        workload: What was planned.
        parameters: Of the model.
        operations: Per token.
        recomputed: Operations per token that the backward pass computes again.
        accumulate: Parts of a device's share of a batch.
        sequences: Sequences that a device computes at once.
        most_sequences: The most, up to its share of a batch, that it has memory for.
        memory: Of each device.
        sent: Bytes that each device sends per update.
        decoding: Of the trained model.
    """

    workload: Workload
    parameters: Parameters
    operations: TokenOperations
    recomputed: int
    accumulate: int
    sequences: int
    most_sequences: int
    memory: DeviceMemory
    sent: int
    decoding: Decoding

    @property
    def model_operations(self) -> int:
        """Operations per token that the model needs: nothing is counted twice."""
        return self.operations.forward + self.operations.backward

    @property
    def executed_operations(self) -> int:
        """Operations per token that are computed."""
        return self.model_operations + self.recomputed

    @property
    def total_operations(self) -> float:
        """Operations of the whole training that the model needs."""
        done = self.workload
        return float(self.model_operations) * done.steps * done.batch * done.length

    @property
    def seconds_per_step(self) -> float:
        """Seconds of an update at the given utilisation."""
        done = self.workload
        rate = done.placing.devices * done.device.peak(done.placing.bf16) * done.utilization
        return self.executed_operations * done.batch * done.length / rate

    @property
    def sending_seconds_per_step(self) -> float:
        """Seconds that what is sent takes at the link's full speed; it may be hidden."""
        return self.sent / self.workload.device.link

    @property
    def hours(self) -> float:
        return self.seconds_per_step * self.workload.steps / 3600

    @property
    def device_hours(self) -> float:
        return self.hours * self.workload.placing.devices

    @property
    def cost(self) -> float | None:
        price = self.workload.price
        return None if price is None else price * self.device_hours


class NoRoomError(ValueError):
    """A training does not fit into a device's memory."""


def plan_training(config: FastWeightsConfig, workload: Workload) -> TrainingPlan:
    """Compute what a training takes, without weights and without its devices.

    Raises:
        NoRoomError: If it does not fit; the message says by how much, and what would.
        TrainingError: If the batch cannot be divided evenly.
    """
    accumulate = _parts(config, workload)
    if accumulate is None:
        raise _no_room(config, workload)
    sequences, parameters = workload.sequences_at_once(accumulate), count_by_part(config)
    operations = count_operations(config, workload.length)
    pieces = sequences * workload.length > LOGITS_AT_ONCE // config.vocab_size
    return TrainingPlan(
        workload=workload,
        parameters=parameters,
        operations=operations,
        recomputed=operations.recomputed(blocks=workload.placing.recompute, head=pieces),
        accumulate=accumulate,
        sequences=sequences,
        most_sequences=max(sequences, _most_sequences(config, workload)),
        memory=_memory(config, workload, accumulate),
        sent=_sent(parameters, workload.placing, accumulate),
        decoding=decoding(config, workload.length, workload.device),
    )


def plan_fitting(config: FastWeightsConfig, workload: Workload) -> TrainingPlan:
    """Plan as `plan_training`, recomputing and sharding where a training does not fit otherwise.

    Raises:
        NoRoomError: If it does not fit in any of these ways.
        TrainingError: If the batch cannot be divided evenly.
    """
    ways = (replace(workload, placing=placing) for placing in _ways(workload.placing))
    return plan_training(config, next((w for w in ways if _parts(config, w)), workload))


def _ways(asked: Placing) -> Iterator[Placing]:
    """What is asked, and with recomputing, sharding and both as far as this changes it."""
    shards = (False, True) if asked.devices > 1 and not asked.shard else (asked.shard,)
    again = (asked.recompute,) if asked.recompute else (False, True)
    for shard in shards:
        for recompute in again:
            yield replace(asked, shard=shard, recompute=recompute)


def _memory(config: FastWeightsConfig, workload: Workload, accumulate: int) -> DeviceMemory:
    return device_memory(
        config,
        workload.placing,
        workload.device,
        workload.sequences_at_once(accumulate),
        workload.length,
        accumulate,
    )


def _parts(config: FastWeightsConfig, workload: Workload) -> int | None:
    """The parts that are asked for, or the fewest that fit; None if they do not fit."""
    parts = workload.accumulate or _least_parts(config, workload)
    fits = parts and _memory(config, workload, parts).excess(workload.device) <= 0
    return parts if fits else None


def _least_parts(config: FastWeightsConfig, workload: Workload) -> int | None:
    """The fewest parts that fit; None if one sequence at once is too many."""
    share, most = workload.sequences_at_once(1), _most_sequences(config, workload)
    parts = (n for n in range(1, share + 1) if share % n == 0 and share // n <= most)
    return next(parts, None)


def _most_sequences(config: FastWeightsConfig, workload: Workload) -> int:
    """The most sequences at once that fit, of the share that a device has.

    Memory is a convex function of their number: the line through two points that lie apart is above
    it between them.
    """
    share, least = workload.sequences_at_once(1), _excess(config, workload, 1)
    if least > 0 or share == 1:
        return int(least <= 0)
    guess = _crossing(least, 2, _excess(config, workload, 2), share)
    return _crossing(least, guess, _excess(config, workload, guess), share) if guess > 1 else 1


def _crossing(least: float, sequences: int, excess: float, share: int) -> int:
    """How many sequences fit by the line through 1 and `sequences`, whose excesses are these; all
    that are known to fit, if these do.
    """
    by_line = 1 + int(-least * (sequences - 1) / (excess - least))
    return min(share, by_line if excess > 0 or sequences == 2 else sequences)


def _excess(config: FastWeightsConfig, workload: Workload, sequences: int) -> float:
    """Bytes that are too many, gradients of an earlier part included."""
    memory = device_memory(
        config, workload.placing, workload.device, sequences, workload.length, accumulate=2
    )
    return memory.excess(workload.device)


def _sent(parameters: Parameters, placing: Placing, accumulate: int) -> int:
    """Bytes that a device sends per update, in rings.

    DDP sums gradients once. FSDP2 gathers the weights of blocks for each forward and each backward
    pass, those of embeddings once per pass, and hands out sums of gradients after each.
    """
    others = (placing.devices - 1) / placing.devices
    everything = FLOAT * parameters.total
    if not placing.shard:
        return round(2 * others * everything)
    blocks = (2 if placing.bf16 else FLOAT) * (parameters.total - parameters.embedding)
    gathered = 2 * blocks + FLOAT * parameters.embedding
    return round(accumulate * others * (gathered + everything))


def _no_room(config: FastWeightsConfig, workload: Workload) -> NoRoomError:
    accumulate = workload.accumulate or workload.sequences_at_once(1)
    memory, device = _memory(config, workload, accumulate), workload.device
    room = bytes_in_words((1 - RESERVE) * device.memory)
    advice = _advice(config, workload)
    return NoRoomError(
        f"training takes {bytes_in_words(memory.total)} of each {device.name} at"
        f" {workload.sequences_at_once(accumulate):,} sequences of {workload.length:,} tokens at"
        f" once, and {room} of its {bytes_in_words(device.memory)} are there for it:"
        f" {bytes_in_words(memory.excess(device))} too many; {advice}"
    )


def _advice(config: FastWeightsConfig, workload: Workload) -> str:
    """What of sharding, recomputing and accumulating would fit, tried out."""
    asked, found = workload.placing, []
    for placing in _ways(asked):
        other = replace(workload, placing=placing, accumulate=None)
        parts = _parts(config, other)
        if parts is not None:
            found.append((placing, parts, _memory(config, other, parts)))
    if not found:
        return (
            "neither --shard nor --recompute nor --accumulate is enough; take more devices, devices"
            " with more memory, or shorter sequences"
        )
    words = (
        " ".join(_options(asked, placing, parts)) + f" ({bytes_in_words(memory.total)})"
        for placing, parts, memory in found
    )
    return f"what fits: {' or '.join(words)}"


def _options(asked: Placing, placing: Placing, parts: int) -> list[str]:
    return [
        *(["--shard"] if placing.shard and not asked.shard else []),
        *(["--recompute"] if placing.recompute and not asked.recompute else []),
        f"--accumulate {parts}",
    ]
