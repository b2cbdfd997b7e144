"""Stage one, attention transfer: every branch learns to reproduce its softmax (LoLCATs, section
3.1).

The layers pass the softmax's output on, so that all of them learn at once and none from another's
mistakes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.modes import AttentionCall, Mode, hide_windows
from fastweights.linearize.distill.losses import LayerParts, require_factors
from fastweights.linearize.evaluate.distances import (
    count_tokens,
    cross_entropy,
    map_distance,
    output_error,
    softmax_map,
    squared_size,
)
from fastweights.methods import evaluate
from fastweights.ranges import PROBABILITY
from fastweights.recurrence import Recurrence
from fastweights.shapes import Output
from fastweights.training.loop.seeds import random_seed_from
from fastweights.training.loop.stage import go_backward


@dataclass(frozen=True)
class TransferLoss:
    """The distance of a layer from its softmax.

    output · Σ‖ŷ - y‖² / Σ‖y‖² - weights · mean_n Σ_i a_ni log â_ni + maps · mean ‖A - Â‖_F

    The first term compares outputs (LoLCATs, arXiv 2410.10254, section 3). It is relative, since
    the size of outputs grows up to 200-fold with depth; its sums are over tokens, heads and
    channels. The second compares attention weights (the workshop paper's eq. 7), in the mean over
    queries n and heads, and the third the matrices that tokens are mixed by, whatever the sign of
    their entries, in the mean over sequences and heads (MOHAWK, arXiv 2408.10189, stage 1); both
    take maps ``[b h t t]``. Padding counts in none. Parts of a batch are as the batch at once where
    there is one term; where there are several, parts count by their tokens in all.

    Attributes:
        output: The factor of the outputs' relative squared error.
        weights: The factor of the weights' cross-entropy.
        maps: The factor of the maps' distance.

    Raises:
        ValueError: If a factor is negative, infinite or NaN, or all are 0.
    """

    output: float = 1.0
    weights: float = 0.0
    maps: float = 0.0

    def __post_init__(self) -> None:
        require_factors(self, self.output, self.weights, self.maps)

    def __call__(self, call: AttentionCall, record: Recurrence, target: Output) -> Tensor:
        """Compute the loss of one layer, a scalar.

        Args:
            call: The layer's call.
            record: The branch's recurrence.
            target: What softmax gives.
        """
        parts = []
        if self.output:
            o = call.branch.read(evaluate(record)[0])
            parts.append(self.output * output_error(o, target, call.keep))
        if self.weights:
            parts.append(self.weights * cross_entropy(record, call.keep))
        if self.maps:
            parts.append(self.maps * map_distance(record, softmax_map(call), call.keep))
        return torch.stack(parts).sum()

    def weight(self, call: AttentionCall, target: Output) -> Tensor:
        """Return what the loss of a part of a batch counts in that of the batch, a scalar.

        Args:
            call: The layer's call.
            target: What softmax gives.
        """
        # a relative error counts by its denominator, so that parts give the error of the whole
        if self.output and not (self.weights or self.maps):
            return squared_size(target, call.keep)
        # a mean over sequences and heads, by sequences
        if self.maps and not (self.output or self.weights):
            return upcast(target).new_tensor(len(target))
        return count_tokens(target, call.keep)


class Transfer(Mode):
    """A mode that passes the softmax output on and records each layer's transfer loss in `losses`.

    All layers thereby learn at once, and none from another's mistakes.

    Args:
        loss: How far a layer is from its softmax.
        dropout: The probability with which a layer is trained without its window in a call, so that
            the linear side learns to do without it (arXiv 2510.05901); 1 trains the linear side
            alone.
        seed: What `dropout` draws is a function of this and of the layer, whatever else is
            computed; None to draw from PyTorch's own generator.

    Attributes:
        losses: The losses of the last forward pass, by layer.

    Raises:
        TrainingError: If `dropout` is not a probability.
    """

    constant = False

    def __init__(
        self,
        loss: TransferLoss = TransferLoss(),
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> None:
        PROBABILITY.require(dropout=dropout)
        self.loss, self.dropout, self.seed = loss, dropout, seed
        self.losses: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Output:
        with torch.no_grad():
            target = call.softmax()
        with torch.enable_grad():
            record = call.record()
            if is_drawn(self.dropout, self.seed, call.layer):
                record = hide_windows(record)
            self.take(call, self.loss(call, record, target), target)
        return target

    @abstractmethod
    def take(self, call: AttentionCall, loss: Tensor, target: Output) -> None:
        """Receive the loss of every layer's call in turn, which holds this layer's graph."""


def is_drawn(probability: float, seed: int | None, layer: int) -> bool:
    """Draw whether something befalls a layer: a function of `seed` and the layer, or by PyTorch's
    own generator if that is None."""
    if probability == 0:
        return False
    if seed is None:
        return bool(torch.rand(()) < probability)
    generator = Generator().manual_seed(random_seed_from(seed, layer))
    return bool(torch.rand((), generator=generator) < probability)


class LossOnly(Transfer):
    """A transfer that keeps the losses without their graphs."""

    def take(self, call: AttentionCall, loss: Tensor, target: Output) -> None:
        self.losses[call.layer] = loss.detach()


class BackwardInForward(Transfer):
    """A transfer that goes backward inside the forward pass, layer by layer.

    It adds the gradient of the losses' sum, in the memory of one layer.

    Args:
        loss: How far a layer is from its softmax.
        dropout: The probability with which a layer is trained without its window.
        seed: What `dropout` draws is a function of this and of the layer; None to draw from
            PyTorch's own generator.
        share: Factor of the gradient, such as one over the number of parts of a batch.
        parts: The parts of the batch, of which this is one.
    """

    def __init__(
        self,
        loss: TransferLoss = TransferLoss(),
        dropout: float = 0.0,
        seed: int | None = None,
        share: float = 1.0,
        parts: LayerParts | None = None,
    ) -> None:
        super().__init__(loss, dropout, seed)
        self.share, self.parts = share, LayerParts() if parts is None else parts

    def take(self, call: AttentionCall, loss: Tensor, target: Output) -> None:
        weight = self.loss.weight(call, target)
        # frees the layer's graph before the next layer has one
        go_backward(loss * self.parts.factor(call.layer, weight, self.share))
        self.losses[call.layer] = loss.detach()


class KeepGraphs(Transfer):
    """A transfer that keeps the losses with their graphs, for a later backward pass."""

    def take(self, call: AttentionCall, loss: Tensor, target: Output) -> None:
        self.losses[call.layer] = loss


def only_branches(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze all parameters of `model` except those of the branches, and return it.

    Raises:
        ValueError: If it has no branches.
    """
    found = branches(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no branches to train; call fastweights.linearize.linearize"
            " first"
        )
    model.requires_grad_(False)
    for branch in found.values():
        branch.requires_grad_(True)
    return model
