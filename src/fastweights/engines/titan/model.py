"""A language model of ours as torchtitan holds it."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import ParallelismConfig
from torchtitan.protocols.model import BaseModel

from fastweights.engines.titan.operations import training_operations
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.block import Block, normalization


class TitanLanguageModel(BaseModel):
    """`FastWeightsForCausalLM` with the interface of torchtitan's decoders: ``tok_embeddings``,
    ``layers``, ``norm`` and ``lm_head``, by which torchtitan shards, compiles and recomputes.

    Attributes:
        language_model: Our model, whose weights have their own names below it.
    """

    _skip_lm_head = False
    """Set by torchtitan where its loss reads hidden states and applies the head by itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What torchtitan builds the model from.

        Attributes:
            language_model: The configuration of ours.
        """

        language_model: FastWeightsConfig

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Compare the settings of a run with what the model can do, before it is built.

            Raises:
                ValueError: The run asks for a parallelism that is not there, or for more positions
                    than the model has learnt.
            """
            require_supported(config.parallelism)
            _require_positions(self.language_model, config.training.seq_len)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Count parameters, and operations per token of training."""
            parameters = sum(p.numel() for p in model.parameters())
            return parameters, training_operations(self.language_model, seq_len)

    def __init__(self, config: Config) -> None:
        super().__init__()
        given = config.language_model
        self.config, self.enable_weight_tying = given, given.tie_word_embeddings
        plain = copy(given)
        plain.logit_cap = None
        self.language_model = FastWeightsForCausalLM(plain)
        self.language_model.model.layers = _Layers(self.language_model.model.layers)
        if given.logit_cap is not None:
            self.language_model.lm_head = CappedHead(given)
        self._tie()

    @property
    def tok_embeddings(self) -> nn.Embedding:
        """The embeddings ``[vocab d]``."""
        return self.language_model.model.embed_tokens

    @property
    def layers(self) -> _Layers:
        """The blocks, by their numbers."""
        return self.language_model.model.layers

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        return self.language_model.model.norm

    @property
    def lm_head(self) -> nn.Linear:
        """The head, which caps logits itself where the model does."""
        return self.language_model.lm_head

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute logits ``[b t vocab]``, or hidden states ``[b t d]`` for a loss with the head.

        Args:
            tokens: ``[b t]``.
            positions: ``[b t]``; at every 0 a document begins, with an empty memory.
        """
        segments = None if positions is None else (positions == 0).cumsum(1)
        read = self.language_model.model
        hidden = read(input_ids=tokens, segments=segments, use_cache=False).last_hidden_state
        return hidden if self._skip_lm_head else self.lm_head(hidden)

    def verify_module_protocol(self) -> None:
        """Nothing to verify: our modules are PyTorch's, and `init_states` starts all of them."""

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Start all weights as `FastWeightsPreTrainedModel` says.

        The parts are made one by one, whole, from the random numbers that all processes share, and
        each process keeps its shard: a model starts alike on any number of them.
        """
        self._tie()
        device = next(self.parameters()).device
        for part, make in self._parts():
            with torch.device(device):
                whole = make().apply(self.language_model._init_weights).state_dict()
            for name, target in part.state_dict().items():
                _fill(target, whole[name])

    def _parts(self) -> Iterator[tuple[nn.Module, Callable[[], nn.Module]]]:
        """Every part of the model, and what makes a new one like it."""
        config, trunk = self.config, self.language_model.model
        d = config.hidden_size
        yield trunk.embed_tokens, lambda: nn.Embedding(config.vocab_size, d)
        if config.learnt_positions is not None and trunk.embed_positions is not None:
            positions = config.learnt_positions
            yield trunk.embed_positions, lambda: nn.Embedding(positions, d)
        for number, shared in enumerate(trunk.shared):
            yield shared, lambda number=number: config.make_shared_blocks()[number]
        for layer, block in enumerate(trunk.layers):
            yield block, lambda layer=layer: Block(config, layer, trunk.shared_by(layer))
        yield trunk.norm, lambda: normalization(config)
        if not self.enable_weight_tying:
            yield self.lm_head, lambda: nn.Linear(d, config.vocab_size, bias=False)

    def _tie(self) -> None:
        if self.enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.weight


class CappedHead(nn.Linear):
    """The head of a model with `logit_cap`: logits are c · tanh(z / c) wherever torchtitan calls
    it, in the model or in a loss that reads hidden states by parts.
    """

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        assert config.logit_cap is not None
        self.cap = config.logit_cap

    def forward(self, input: Tensor) -> Tensor:
        """Logits ``[… vocab]`` of hidden states ``[… d]``."""
        return self.cap * torch.tanh(super().forward(input) / self.cap)


class _Layers(nn.ModuleList):
    """Blocks that are read by number, as ours are, and by name, as torchtitan's are."""

    def items(self) -> ItemsView[str, nn.Module]:
        return self._modules.items()


def _fill(target: Tensor, whole: Tensor) -> None:
    """Write a tensor into one of its shape, of which a process may hold a shard."""
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)


def require_supported(parallelism: ParallelismConfig) -> None:
    """Refuse ways to divide a model that ours has not.

    Raises:
        ValueError: One of them is asked for; the message says what to set instead.
    """
    for name, reason in (
        ("tensor_parallel_degree", "layers are not cut over their channels"),
        ("pipeline_parallel_degree", "a model is not cut over its depth"),
        (
            "context_parallel_degree",
            "torchtitan's cuts the keys of an attention over time, and a recurrence hands on a"
            " state instead",
        ),
    ):
        degree = getattr(parallelism, name)
        if degree > 1:
            raise ValueError(
                f"parallelism.{name} = {degree} is not supported for fastweights' models: {reason};"
                " set it to 1, and divide the weights by parallelism.data_parallel_shard_degree"
            )
    if parallelism.spmd_backend == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend = 'full_dtensor' is not supported for fastweights' models,"
            " whose kernels read plain tensors; leave it at 'spmd_types'"
        )


def _require_positions(config: FastWeightsConfig, length: int) -> None:
    known = config.learnt_positions
    if known is not None and length > known:
        raise ValueError(
            f"training.seq_len = {length}, but the model has learnt_positions = {known}; take a"
            " length up to that"
        )
