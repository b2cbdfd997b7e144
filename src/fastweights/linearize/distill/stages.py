"""The training stages of a linearization, on text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fastweights.linearize.convert.attention import branches, use_mode
from fastweights.linearize.convert.modes import (
    AttentionCall,
    Mode,
    Student,
    Teacher,
    hide_window,
    require_window,
)
from fastweights.linearize.distill.adapt import LogitSource, TokenLoss
from fastweights.linearize.distill.align import (
    HiddenLoss,
    Receive,
    aligned_layers,
    alignment,
    hidden_states,
)
from fastweights.linearize.distill.fit import PartialStage
from fastweights.linearize.distill.parts import LayerParts
from fastweights.linearize.distill.transfer import (
    BackwardInForward,
    LossOnly,
    TransferLoss,
    attend_all,
    is_drawn,
    only_branches,
)
from fastweights.runs.devices import to_device
from fastweights.runs.evaluation import evaluation_mode
from fastweights.runs.processes import Alone, Processes
from fastweights.runs.report import Counts
from fastweights.runs.seeds import random_seed_from
from fastweights.runs.stage import go_backward
from fastweights.shapes import Output
from fastweights.text.documents import Batches, Stream, count_learnt


class TextStage(PartialStage):
    """A training stage on streams of text.

    Attributes:
        train: Batches to train on.
        validation: The text to validate on.
        together: Sequences that are validated at once.
    """

    def __init__(self, model: Any, train: Batches, validation: Stream, together: int = 4) -> None:
        self.model, self.train, self.validation, self.together = model, train, validation, together
        self.tokens_per_sequence = train.length

    def summary(self) -> Counts:
        return {
            "vocabulary": self.model.config.vocab_size,
            "train_tokens": self.train.tokens,
            "validation_tokens": self.validation.tokens,
        }

    def on_device(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_device(inputs, self.model.device)

    def without_labels(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs in a batch, on the model's device."""
        return self.on_device({name: x for name, x in batch.items() if name != "labels"})


class TransferStage(TextStage):
    """Stage one, attention transfer: ``loss`` is the mean over layers, ``loss/3`` that of layer
    3."""

    def __init__(
        self,
        model: PreTrainedModel,
        train: Batches,
        validation: Stream,
        loss: TransferLoss = TransferLoss(),
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(only_branches(model), train, validation)
        self.loss, self.dropout, self.dropout_seed = loss, dropout, seed
        self.parts = LayerParts()

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        seed = random_seed_from(self.dropout_seed, first)
        mode = BackwardInForward(self.loss, self.dropout, seed, share, self.parts)
        attend_all(self.model, self.without_labels(self.train.batch(first, count)), mode)
        return losses_by_name("loss", mode.losses)

    def combine(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        shares: Sequence[float],
        processes: Processes,
    ) -> dict[str, Tensor]:
        return combine_by_layer(parts, self.parts.settle(branches(self.model), processes))

    def clipped_parts(self) -> Iterable[nn.Module]:
        return branches(self.model).values()

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        with evaluation_mode(self.model):
            return _mean_losses(self._losses, self, processes)

    def _losses(self, batch: Mapping[str, Tensor]) -> Mapping[int, Tensor]:
        mode = LossOnly(self.loss)
        attend_all(self.model, self.without_labels(batch), mode)
        return mode.losses


def combine_by_layer(
    parts: Sequence[Mapping[str, Tensor]], shares: Mapping[int, Sequence[float]]
) -> dict[str, Tensor]:
    """The losses of a batch by name, from those of its parts and every layer's shares of them."""
    totals = dict[int, Tensor]()
    for layer, of_parts in shares.items():
        losses = [losses[f"loss/{layer}"] for losses in parts]
        totals[layer] = torch.stack(losses).mul(losses[0].new_tensor(of_parts)).sum()
    return losses_by_name("loss", totals)


def losses_by_name(name: str, losses: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The mean, and every layer's own."""
    mean = torch.stack([loss.cpu() for loss in losses.values()]).mean()
    return {name: mean, **{f"{name}/{layer}": loss.cpu() for layer, loss in sorted(losses.items())}}


class AlignStage(TextStage):
    """Hidden-state alignment: ``loss`` is the mean over layers, ``loss/3`` that of layer 3.

    It goes backward inside the forward pass, in the memory of one layer, unless the model is
    divided: every layer reads the teacher's states, to which no gradient goes.

    Args:
        model: The linearized model, of which the parameters to train require gradients.
        train: Batches to train on.
        validation: The text to validate on.
        loss: How far a layer is from its softmax model's.
        teacher: Gives the softmax model as it was; None for the model itself, if its weights stay.
    """

    def __init__(
        self,
        model: Any,
        train: Batches,
        validation: Stream,
        loss: HiddenLoss = HiddenLoss(),
        teacher: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(model, train, validation)
        self.loss, self.teacher = loss, teacher
        self.paths, self.parts = aligned_layers(model, loss.blocks), LayerParts()

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        self.model.eval()  # a dropout would show layers something else than the teacher's
        batch = self.train.batch(first, count)
        kept = list[Tensor]()
        # A divided model's layers are brought together by one backward.
        take = kept.append if isinstance(self.model, FSDPModule) else go_backward

        def receive(layer: int, loss: Tensor, weight: Tensor) -> None:
            take(loss * self.parts.factor(layer, weight, share))

        losses = self._losses(batch, receive)
        if kept:
            go_backward(torch.stack(kept).sum())
        return losses_by_name("loss", losses)

    def combine(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        shares: Sequence[float],
        processes: Processes,
    ) -> dict[str, Tensor]:
        return combine_by_layer(parts, self.parts.settle(self._layers(), processes))

    def clipped_parts(self) -> Iterable[nn.Module]:
        return self._layers().values()

    def _layers(self) -> dict[int, nn.Module]:
        return {layer: self.model.get_submodule(path) for layer, path in self.paths.items()}

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        with evaluation_mode(self.model):
            return _mean_losses(self._losses, self, processes)

    def _losses(
        self,
        batch: Mapping[str, Tensor],
        receive: Receive = lambda layer, loss, weight: None,
    ) -> Mapping[int, Tensor]:
        inputs = self.without_labels(batch)
        targets = self._targets(inputs)
        return alignment(self.model, self.paths, inputs, targets, self.loss, receive)

    def _targets(self, inputs: Mapping[str, Tensor]) -> dict[int, Tensor]:
        if self.teacher is not None:
            return hidden_states(self.teacher(), self.paths, inputs)
        with use_mode(self.model, Teacher()):
            return hidden_states(self.model, self.paths, inputs)


def _mean_losses(
    losses: Callable[[Mapping[str, Tensor]], Mapping[int, Tensor]],
    stage: TextStage,
    processes: Processes,
) -> dict[str, float]:
    """The layers' losses on the validation text, and their mean, in the mean over tokens."""
    totals, tokens = dict[str, float](), 0
    for batch, counts in processes.share(stage.validation.sequential_batches(stage.together)):
        count = counts * batch["input_ids"].numel()
        tokens += count
        for name, loss in losses_by_name("val_loss", losses(batch)).items():
            totals[name] = totals.get(name, 0.0) + count * float(loss)
    found = processes.total({**totals, "tokens": tokens})
    tokens = found.pop("tokens")
    return {name: total / tokens for name, total in found.items()}


class PartlyLinear(Mode):
    """A mode in which some layers are softmax still, and others may be without their window.

    Args:
        softmax: The numbers of the layers that are softmax.
        dropout: The probability with which a linear layer is without its window.
        seed: What `dropout` draws is a function of this and of the layer.
    """

    constant = False

    def __init__(self, softmax: Collection[int], dropout: float = 0.0, seed: int = 0) -> None:
        self.softmax, self.dropout, self.seed = softmax, dropout, seed

    def attend(self, call: AttentionCall) -> Output:
        if call.layer in self.softmax:
            return call.softmax()
        if is_drawn(self.dropout, self.seed, call.layer):
            return call.linear(lambda record: hide_window(require_window(record, self)))
        return call.linear()


def softmax_layers(layers: Sequence[int], share: float) -> list[int]:
    """Return those of the layers that are softmax while `share` of them is: one of every 1 / share.

    With shares of 1/2, 1/4, 1/8 each contains the next, and the last of every group stays (Wang et
    al., 2024).
    """
    period = round(1 / share) if share else len(layers) + 1
    return [layer for place, layer in enumerate(layers, 1) if place % period == 0]


class AdaptStage(TextStage):
    """A model that adapts as a whole to its linear layers.

    ``val_loss`` is the loss of the next token, in nats.

    Args:
        model: The linearized model, of which the parameters to train require gradients.
        train: Batches to train on.
        validation: The text to validate on.
        loss: The loss.
        source: The teacher, if the loss has one; None for the model itself.
        softmax: The numbers of the converted layers that are softmax in this stage.
        dropout: The probability with which a layer is trained without its window.
        seed: Seed of `dropout`.
    """

    def __init__(
        self,
        model: Any,
        train: Batches,
        validation: Stream,
        loss: TokenLoss = TokenLoss(),
        *,
        source: LogitSource | None = None,
        softmax: Collection[int] = (),
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(model, train, validation)
        self.loss, self.source, self.softmax = loss, source, softmax
        self.dropout, self.dropout_seed = dropout, seed

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        seed = random_seed_from(self.dropout_seed, first)
        with use_mode(self.model, self._mode(self.dropout, seed)):
            batch = self.on_device(self.train.batch(first, count))
            loss = self.loss(self.model, batch, self.source, first)
            go_backward(loss * share)
        return {"loss": loss.detach().cpu()}

    def learnt(self, first: int, count: int) -> int:
        return self.train.learnt(first, count)

    def _mode(self, dropout: float = 0.0, seed: int = 0) -> Mode:
        return PartlyLinear(self.softmax, dropout, seed) if self.softmax or dropout else Student()

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        total, tokens = 0.0, 0
        with evaluation_mode(self.model), use_mode(self.model, self._mode()):
            batches = self.validation.sequential_batches(self.together)
            for batch, counts in processes.share(batches):
                learnt = counts * count_learnt(batch["labels"])
                total += learnt * float(TokenLoss()(self.model, self.on_device(batch)))
                tokens += learnt
        found = processes.total({"loss": total, "tokens": tokens})
        return {"val_loss": found["loss"] / max(found["tokens"], 1)}
