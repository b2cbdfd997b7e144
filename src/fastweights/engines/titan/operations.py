"""Floating-point operations of training, for torchtitan's report of utilization."""

from __future__ import annotations

import torch

from fastweights.analysis.cost import PASSES, Cost, cost
from fastweights.layers import Experts
from fastweights.mixers.shared import SharedAttention
from fastweights.models import FastWeightsConfig
from fastweights.models.size import count_parameters


def training_operations(config: FastWeightsConfig, length: int) -> int:
    """Count the operations of training per token, forward and backward.

    A mixer takes what `analysis.cost` says of it, whose state is counted by its rule; every other
    weight that is multiplied by takes 6. Recomputation for activation checkpointing is not counted,
    nor are embeddings that are only looked up.

    Args:
        config: The language model.
        length: Tokens per sequence.

    Returns:
        Operations per token; a multiplication and an addition are two.
    """
    kinds = [[cost(m, length) for m in config.make_mixers(one)] for one in config.mixers]
    of_layers = (kinds[layer % len(kinds)] for layer in range(config.num_hidden_layers))
    shared, uses = _shared(config, length)
    layers = [*uses, *(one for side_by_side in of_layers for one in side_by_side)]
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size
    looked_up += config.learnt_positions or 0
    multiplied = (
        count_parameters(config)
        - sum(layer.parameters for layer in layers)
        - looked_up * config.hidden_size
        - _idle_parameters(config)
        - shared
    )
    return sum(layer.train for layer in layers) + 2 * PASSES * multiplied


def _shared(config: FastWeightsConfig, length: int) -> tuple[int, list[Cost]]:
    """The parameters of blocks that layers share, and what each use of one costs."""
    with torch.device("meta"):
        blocks = config.make_shared_blocks()
        uses = [SharedAttention(blocks[number]) for number in config.layer_shared_blocks.values()]
    weights = [p.numel() for block in blocks for p in block.parameters()]
    return sum(weights), [cost(use, length) for use in uses]


def _idle_parameters(config: FastWeightsConfig) -> int:
    """The parameters of experts that a token does not choose."""
    with torch.device("meta"):
        mlps = [config.make_mlp(layer) for layer in range(config.period)]
    idle = [mlp.idle_parameters if isinstance(mlp, Experts) else 0 for mlp in mlps]
    return sum(idle[layer % len(idle)] for layer in range(config.num_hidden_layers))
