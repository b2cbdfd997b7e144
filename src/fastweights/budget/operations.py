"""Parameters and floating-point operations of a language model, part by part, without its
weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fastweights.analysis.cost import PASSES, operations
from fastweights.mixer import Mixer, MixerSum
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.block import Block
from fastweights.models.size import sketch_of


@dataclass(frozen=True)
class Parameters:
    """Numbers that a model learns.

    Attributes:
        embedding: Of tokens and positions, and of the head where it has weights of its own.
        mixers: Of the mixers, and of the blocks that layers share.
        mlp: Of the MLPs.
        norms: Of the norms around them.
        largest_block: Of the block that has most.
    """

    embedding: int
    mixers: int
    mlp: int
    norms: int
    largest_block: int

    @property
    def total(self) -> int:
        return self.embedding + self.mixers + self.mlp + self.norms


@dataclass(frozen=True)
class TokenOperations:
    """Operations per token of a training sequence, forward; products and recurrences alone are
    counted.

    Attributes:
        projections: Products of the mixers' projections and of MLPs.
        head: The product that makes the logits.
        recurrences: By the name of the rule.
    """

    projections: int
    head: int
    recurrences: Mapping[str, int]

    @property
    def recurrent(self) -> int:
        """Of all recurrences."""
        return sum(self.recurrences.values())

    @property
    def forward(self) -> int:
        return self.projections + self.head + self.recurrent

    @property
    def backward(self) -> int:
        """Twice the forward pass: the gradients of inputs, and of weights or streams."""
        return (PASSES - 1) * self.forward

    def recomputed(self, *, blocks: bool, head: bool) -> int:
        """What the backward pass computes again: the inside of blocks, the logits."""
        inside = self.projections + self.recurrent
        return (inside if blocks else 0) + (self.head if head else 0)


def count_by_part(config: FastWeightsConfig) -> Parameters:
    """Count a model's parameters by the part that they belong to."""
    return _parameters(config.to_json_string())


def count_operations(config: FastWeightsConfig, length: int) -> TokenOperations:
    """Count the operations of a model per token of sequences of `length` tokens.

    Raises:
        TypeError: If a rule does not state its operations.
    """
    return _operations(config.to_json_string(), length)


def config_of(text: str) -> FastWeightsConfig:
    """The configuration in a JSON text, by which what is computed from one is remembered."""
    return FastWeightsConfig.from_dict(json.loads(text))


@lru_cache
def _parameters(text: str) -> Parameters:
    config = config_of(text)
    model = sketch_model(config)
    blocks = list(blocks_of(model, config))
    embeddings = {id(p): p for p in _embedding_parameters(model)}
    return Parameters(
        embedding=sum(p.numel() for p in embeddings.values()),
        mixers=_count(model.model.shared)
        + sum(_count(block.mixer) + _count(block.shared) for block in blocks),
        mlp=sum(_count(block.mlp) for block in blocks),
        norms=_count(model.model.norm)
        + sum(_count(norm) for block in blocks for norm in block.norms),
        largest_block=max(map(_count, blocks)),
    )


@lru_cache
def _operations(text: str, length: int) -> TokenOperations:
    config = config_of(text)
    model = sketch_model(config)
    kinds = [
        ([operations(one, length) for one in mixers_of(block)], _products(block.mlp, config))
        for block in kinds_of(model)
    ]
    projections, recurrences = 0, Counter[str]()
    for layer in range(config.num_hidden_layers):
        mixers, mlp = kinds[layer % len(kinds)]
        projections += sum(mixer.projections for mixer in mixers) + mlp
        for mixer in mixers:
            recurrences[mixer.rule] += mixer.chunk
    return TokenOperations(projections, _products(model.lm_head, config), dict(recurrences))


def sketch_model(config: FastWeightsConfig) -> FastWeightsForCausalLM:
    """The model with one block of each kind, without weights."""
    with torch.device("meta"):
        return FastWeightsForCausalLM(sketch_of(config))


def blocks_of(model: FastWeightsForCausalLM, config: FastWeightsConfig) -> Iterator[Block]:
    """Every block of the whole model, one of each kind standing for all."""
    return islice(cycle(kinds_of(model)), config.num_hidden_layers)


def kinds_of(model: FastWeightsForCausalLM) -> list[Block]:
    """The blocks of a model that `sketch_model` made."""
    return [block for block in model.model.layers if isinstance(block, Block)]


def mixers_of(block: Block) -> list[Mixer]:
    """A block's mixer, or all that stand side by side, and its use of a shared block."""
    side_by_side = block.mixer.mixers if isinstance(block.mixer, MixerSum) else [block.mixer]
    return [mixer for mixer in (block.shared, *side_by_side) if isinstance(mixer, Mixer)]


def _embedding_parameters(model: FastWeightsForCausalLM) -> Iterator[nn.Parameter]:
    trunk = model.model
    for module in (trunk.embed_tokens, trunk.embed_positions, model.lm_head):
        if module is not None:
            yield from module.parameters()


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _products(module: nn.Module | None, config: FastWeightsConfig) -> int:
    """The operations of a module's products for one token."""
    if module is None:
        return 0
    x = torch.zeros(1, 1, config.hidden_size, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()
