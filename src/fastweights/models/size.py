"""The size of a model before it is built: parameters, and whether this machine can hold them."""

from __future__ import annotations

import os
from copy import copy

import torch

from fastweights.models.config import FastWeightsConfig
from fastweights.models.hf import FastWeightsForCausalLM
from fastweights.render.units import bytes_in_words

LAYER_BYTES = 20_000
"""What the objects of a layer take at least, beside its parameters."""


def count_parameters(config: FastWeightsConfig) -> int:
    """Count the parameters of a language model without building more than one layer of each kind.

    Raises:
        ValueError: If a single layer is larger than tensors can be.
    """
    kinds, layers = config.period, config.num_hidden_layers
    with torch.device("meta"):
        try:
            model = FastWeightsForCausalLM(sketch_of(config))
        except RuntimeError as error:
            raise ValueError(
                f"{_sizes(config)}: a tensor of such a model is larger than any can be; make it"
                " smaller"
            ) from error
    repeated = sum(
        (len(range(kind, layers, kinds)) - 1) * sum(p.numel() for p in block.parameters())
        for kind, block in enumerate(model.model.layers)
    )
    return sum(p.numel() for p in model.parameters()) + repeated


def sketch_of(config: FastWeightsConfig) -> FastWeightsConfig:
    """The configuration of the same model with one layer of each kind."""
    sketch = copy(config)
    sketch.num_hidden_layers = config.period
    return sketch


def require_memory(
    config: FastWeightsConfig, bytes_per_parameter: int, others: int = 0, purpose: str = "hold"
) -> None:
    """Check that the machine has the memory that a language model needs at the very least.

    Args:
        config: The model's configuration.
        bytes_per_parameter: Of the weights and whatever is kept for each of them.
        others: Bytes that are needed beside.
        purpose: What the memory is for; a verb of the message.

    Raises:
        ValueError: If it has less; the message names parameters and bytes.
    """
    parameters = count_parameters(config)
    objects = LAYER_BYTES * config.num_hidden_layers
    needed, there = parameters * bytes_per_parameter + objects + others, machine_memory()
    if needed > there:
        raise ValueError(
            f"{_sizes(config)}: a model of {parameters:,} parameters takes"
            f" {bytes_in_words(needed)} at least to {purpose}, and this machine has"
            f" {bytes_in_words(there)} of memory; make it smaller"
        )


def machine_memory() -> int:
    """The bytes of this machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _sizes(config: FastWeightsConfig) -> str:
    """What makes a model large; one token stands for a vocabulary that is not known yet."""
    names = ("num_hidden_layers", "hidden_size", *(["vocab_size"] if config.vocab_size > 1 else []))
    return ", ".join(f"{name} = {getattr(config, name):,}" for name in names)
