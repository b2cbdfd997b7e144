"""The memory that the parts of a model take in a step of training, found by going through the step
on tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from fastweights.budget.devices import Accelerator
from fastweights.budget.ledger import MemoryLedger
from fastweights.budget.operations import config_of
from fastweights.kernels import pooling, rehearse
from fastweights.kernels.triton.chips import CHIPS, Chip, pretend
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loss import cross_entropy
from fastweights.models.size import sketch_of


@dataclass(frozen=True)
class Footprint:
    """The bytes of one part of a model in a step, without its parameters.

    Attributes:
        forward: The most that its forward pass takes at once, with its result.
        kept: What is kept of that for the backward pass, with its result.
        backward: The most that its backward pass takes at once beyond what was kept, with the
            gradient that it begins with.
        left: What stays of it after the backward pass, besides gradients: autocast's copies of
            weights.
        gradients: The gradients of parameters that it makes.
    """

    forward: int
    kept: int
    backward: int
    left: int
    gradients: int


@dataclass(frozen=True)
class Footprints:
    """The parts of a language model in a step.

    Attributes:
        embedding: From tokens to vectors.
        blocks: One per kind of block, in the order in which kinds repeat over the layers.
        layers: Number of blocks.
        head: The last norm, logits and loss.
    """

    embedding: Footprint
    blocks: tuple[Footprint, ...]
    layers: int
    head: Footprint

    @property
    def of_layers(self) -> list[Footprint]:
        """One per block."""
        return [self.blocks[layer % len(self.blocks)] for layer in range(self.layers)]

    @property
    def kept(self) -> int:
        """Bytes kept between forward and backward."""
        return sum(part.kept for part in (self.embedding, *self.of_layers, self.head))

    def peak(self, *, gradients_exist: bool) -> int:
        """The most bytes at once beside parameters, what the optimiser keeps, and, if
        `gradients_exist`, gradients."""
        parts, live, peak = [self.embedding, *self.of_layers, self.head], 0, 0
        for part in parts:
            peak = max(peak, live + part.forward)
            live += part.kept
        for part in reversed(parts):
            peak = max(peak, live + part.backward)
            live += part.left - part.kept + (0 if gradients_exist else part.gradients)
        return peak


@dataclass(frozen=True)
class StepShape:
    """What a step computes at once on a device, and how.

    Attributes:
        sequences: Sequences in a forward pass.
        length: Tokens of each.
        bf16: Whether matrix products are in bfloat16.
        recompute: Whether blocks compute their inside again in the backward pass.
    """

    sequences: int
    length: int
    bf16: bool = False
    recompute: bool = False


class UntraceableError(ValueError):
    """A mixer looks at numbers in its forward pass, which a trace does not have."""


def trace(config: FastWeightsConfig, shape: StepShape, device: Accelerator) -> Footprints:
    """Find what a step of training takes of a device's memory, without weights or the device.

    The kernels are those that the device would be given, their scratch memory outside of torch left
    out. What attention keeps is that of torch's fused kernel.

    Raises:
        UntraceableError: If what a mixer computes depends on numbers that it looks at.
    """
    try:
        return _trace(config.to_json_string(), shape, device.chip)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        names = ", ".join(config.mixer_names)
        raise UntraceableError(
            f"the memory of {names} is not known in advance: what it computes depends on numbers"
            f" that it looks at ({error})"
        ) from error


@lru_cache(maxsize=256)
def _trace(config: str, shape: StepShape, chip: Chip | None) -> Footprints:
    whole = config_of(config)
    with without_numbers(chip):
        model = FastWeightsForCausalLM(sketch_of(whole)).train()
        return _Tracer(model, shape).footprints(whole.num_hidden_layers)


@contextmanager
def without_numbers(chip: Chip | None) -> Iterator[None]:
    """Inside the block tensors have no numbers, and kernels are those of a GPU or, without one, of
    the CPU.
    """
    kind = "cpu" if chip is None else "cuda"
    with FakeTensorMode(), rehearse(kind), pooling(False), pretend(chip or CHIPS[90]):
        yield


class _Tracer:
    """Goes through the parts of a model in the order of a backward pass."""

    def __init__(self, model: FastWeightsForCausalLM, shape: StepShape) -> None:
        self.model, self.shape = model, shape

    def footprints(self, layers: int) -> Footprints:
        trunk, d = self.model.model, self.model.config.hidden_size
        ids = torch.zeros(self.shape.sequences, self.shape.length, dtype=torch.long)
        x = torch.zeros(*ids.shape, d, requires_grad=True)
        head = self._part(lambda x: self._loss(x, ids), x)
        blocks = [self._part(self._block(block), x) for block in trunk.layers]
        embedding = self._part(self._embed, ids)
        return Footprints(embedding, tuple(blocks), layers, head)

    def _block(self, block: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            # x stands for what other layers say, too
            return block(x, None, None, None, values=x, embeddings=x)[0]

        if not self.shape.recompute:
            return run
        return lambda x: checkpoint(run, x, use_reentrant=False)  # type: ignore[return-value]

    def _embed(self, ids: Tensor) -> Tensor:
        trunk = self.model.model
        return trunk.dropout(trunk.embed_tokens(ids) * trunk.config.input_scale)

    def _loss(self, x: Tensor, ids: Tensor) -> Tensor:
        loss = self.model._loss(self.model.model.norm(x), ids, None, None, cross_entropy)
        assert loss is not None
        return loss

    def _part(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Footprint:
        bf16 = torch.autocast("cpu", torch.bfloat16) if self.shape.bf16 else nullcontext()
        x.grad, ledger, before = None, MemoryLedger(), _gradient_bytes(self.model)
        with ledger, bf16:
            ledger.know(x, *self.model.parameters(), *_gradients_of(self.model))
            y = run(x)
            forward, kept = ledger.peak, ledger.live
            gradient, edge = torch.zeros_like(y), get_gradient_edge(y)
            del y
            ledger.restart()
            with torch.autocast("cpu", enabled=False):
                torch.autograd.backward([edge], [gradient])
            del gradient
            made = _gradient_bytes(self.model) - before
            passed_on = 0 if x.grad is None else x.grad.untyped_storage().nbytes()
            left = ledger.live - made - passed_on
        return Footprint(forward, kept, ledger.peak - kept, left, made)


def _gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _gradient_bytes(model: nn.Module) -> int:
    return sum(gradient.untyped_storage().nbytes() for gradient in _gradients_of(model))
