"""Whether a training fits into memory, found out before anything is read or built."""

from __future__ import annotations

from contextlib import suppress

from fastweights.budget import CPU, Placing, UntraceableError, device_memory
from fastweights.models import FastWeightsConfig
from fastweights.models.size import machine_memory, require_memory
from fastweights.render.units import bytes_in_words
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.processes import Processes
from fastweights.training.loop.stage import Optimization

HELD = 2
"""Numbers that a CPU holds per parameter besides the optimiser's: it and its gradient."""
INSIDE = 256
"""Times its input that a block keeps for the backward pass at the very most."""


def require_memory_to_train(
    model: FastWeightsConfig,
    config: Optimization,
    length: int,
    processes: Processes,
    layout: Layout = Layout(),
) -> None:
    """Check that a training can fit into the machine's memory.

    Counted is what is needed in any case: parameters with what the optimiser keeps of them and, of
    the sequences computed at once, the input of every layer; where that fits, but not by far, all
    that the step keeps, as `fastweights plan` computes it. On an accelerator the main memory holds
    the new parameters only.

    Raises:
        ValueError: If it cannot; the message names parameters and bytes.
    """
    if processes.device.type != "cpu":
        require_memory(model, 4)
        return
    sequences, length = config.sequences_at_once(processes), length // layout.slices
    parts = processes.count if layout.shard else 1
    inputs = sequences * length * model.hidden_size * model.num_hidden_layers * 4
    purpose = f"train on {sequences:,} sequences of {length:,} tokens at once"
    held = 4 * (HELD + config.optimizer.kept) // parts
    require_memory(model, held, inputs // (2 if config.bf16 else 1), purpose)
    if INSIDE * inputs > machine_memory():
        with suppress(UntraceableError):
            placing = Placing(processes.count, layout.shard, layout.recompute, config.bf16)
            memory = device_memory(model, placing, CPU, sequences, length, config.accumulate)
            if memory.total > machine_memory():
                raise ValueError(
                    f"{sequences:,} sequences of {length:,} tokens at once take"
                    f" {bytes_in_words(memory.total)} to train on,"
                    f" {bytes_in_words(memory.activations)} of it kept for the backward pass, and"
                    f" this machine has {bytes_in_words(machine_memory())} of memory; compute a"
                    " batch in more parts (accumulate), or take smaller batches, shorter sequences"
                    " or a smaller model"
                )
