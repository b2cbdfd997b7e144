"""Whether a training fits into memory, found out before anything is read or built."""

from __future__ import annotations

from fastweights.models import FastWeightsConfig
from fastweights.models.size import require_memory
from fastweights.runs.layout import Layout
from fastweights.runs.processes import Processes
from fastweights.runs.stage import Optimization

HELD = 2
"""Numbers that a CPU holds per parameter besides the optimiser's: it and its gradient."""


def require_memory_to_train(
    model: FastWeightsConfig,
    config: Optimization,
    length: int,
    processes: Processes,
    layout: Layout = Layout(),
) -> None:
    """Check that a training can fit into the machine's memory.

    Counted is what is needed in any case: parameters with what the optimiser keeps of them and, of
    the sequences computed at once, the input of every layer. On an accelerator the main memory
    holds the new parameters only.

    Raises:
        ValueError: If it cannot; the message names parameters and bytes.
    """
    if processes.device.type != "cpu":
        require_memory(model, 4)
        return
    tokens = config.sequences_at_once(processes) * length
    per_token = model.hidden_size * model.num_hidden_layers * (2 if config.bf16 else 4)
    parts = processes.count if layout.shard else 1
    require_memory(
        model,
        4 * (HELD + config.optimizer.kept) // parts,
        tokens * per_token,
        f"train on {config.sequences_at_once(processes):,} sequences of {length:,} tokens at once",
    )
