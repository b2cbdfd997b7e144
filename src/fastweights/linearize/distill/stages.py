"""The training stages of a linearization, on text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fastweights.linearize.convert.attention import aligned_layers, attend_all, branches, use_mode
from fastweights.linearize.convert.modes import (
    AttentionCall,
    Mode,
    Student,
    Teacher,
    hide_windows,
)
from fastweights.linearize.distill.adapt import LogitSource, TokenLoss
from fastweights.linearize.distill.align import HiddenLoss, Receive, alignment, hidden_states
from fastweights.linearize.distill.fit import PartialStage
from fastweights.linearize.distill.losses import LayerParts
from fastweights.linearize.distill.transfer import (
    BackwardInForward,
    LossOnly,
    TransferLoss,
    is_drawn,
    only_branches,
)
from fastweights.linearize.evaluate.evaluation import comparison_batches
from fastweights.linearize.evaluate.known import KnownText
from fastweights.linearize.evaluate.logits import inputs_of, read_out, unwrap_adapters
from fastweights.models.evaluation import evaluation_mode
from fastweights.shapes import Output
from fastweights.training.data.documents import Batches, Stream, count_learnt, to_device
from fastweights.training.loop.processes import Alone, Processes
from fastweights.training.loop.report import Counts
from fastweights.training.loop.seeds import random_seed_from
from fastweights.training.loop.stage import go_backward


class TextStage(PartialStage):
    """A training stage on streams of text.

    Attributes:
        train: Batches to train on.
        validation: The text to validate on; None for a stage that asks for no text.
    """

    def __init__(self, model: Any, train: Batches, validation: Stream | None) -> None:
        self.model, self.train, self.validation = model, train, validation
        self.tokens_per_sequence = train.length

    def summary(self) -> Counts:
        return {
            "vocabulary": self.model.config.vocab_size,
            "train_tokens": self.train.tokens,
            "validation_tokens": 0 if self.validation is None else self.validation.tokens,
        }

    def validation_batches(self) -> Collection[Mapping[str, Tensor]]:
        """The text to validate on, in batches."""
        if self.validation is None:
            return []
        return comparison_batches(self.validation, unwrap_adapters(self.model).config)


class LayerStage(TextStage):
    """A stage in which every layer has a loss of its own: ``loss`` is the mean over layers,
    ``loss/3`` that of layer 3."""

    def __init__(self, model: Any, train: Batches, validation: Stream | None) -> None:
        super().__init__(model, train, validation)
        self.parts = LayerParts()

    @abstractmethod
    def layers(self) -> Mapping[int, nn.Module]:
        """What each layer's loss trains, by the number of the layer."""

    def judged(self) -> dict[str, list[str]]:
        names = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        return {
            f"val_loss/{layer}": [names[id(p)] for p in part.parameters() if id(p) in names]
            for layer, part in self.layers().items()
        }

    @abstractmethod
    def losses(self, batch: Mapping[str, Tensor]) -> Mapping[int, Tensor]:
        """Compute the layers' losses on a batch, without graphs."""

    def combine(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        shares: Sequence[float],
        processes: Processes,
    ) -> dict[str, Tensor]:
        totals = dict[int, Tensor]()
        for layer, of_parts in self.parts.settle(self.layers(), processes).items():
            # this process's Σ_k w_k loss_k over the processes' mean Σ_k w_k, to be averaged later
            losses = [losses[f"loss/{layer}"] for losses in parts]
            totals[layer] = torch.stack(losses).mul(losses[0].new_tensor(of_parts)).sum()
        return losses_by_name("loss", totals)

    def clipped_parts(self) -> Iterable[nn.Module]:
        return self.layers().values()

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        """The layers' losses and their mean, each in the mean over tokens."""
        totals, tokens = dict[str, float](), 0
        with evaluation_mode(self.model):
            for batch, counts in processes.share(self.validation_batches()):
                # what a process reads only to keep step with the others does not count
                count = counts * batch["input_ids"].numel()
                tokens += count
                for name, loss in losses_by_name("val_loss", self.losses(batch)).items():
                    totals[name] = totals.get(name, 0.0) + count * float(loss)
        found = processes.total({**totals, "tokens": tokens})
        tokens = found.pop("tokens")
        return {name: total / tokens for name, total in found.items()}


def losses_by_name(name: str, losses: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The mean, and every layer's own."""
    mean = torch.stack([loss.cpu() for loss in losses.values()]).mean()
    return {name: mean, **{f"{name}/{layer}": loss.cpu() for layer, loss in sorted(losses.items())}}


class TransferStage(LayerStage):
    """Attention transfer: every branch learns to give what softmax gives."""

    def __init__(
        self,
        model: PreTrainedModel,
        train: Batches,
        validation: Stream | None,
        loss: TransferLoss = TransferLoss(),
        dropout: float = 0.0,
        seed: int = 0,
        known: KnownText | None = None,
    ) -> None:
        super().__init__(only_branches(model), train, validation)
        self.loss, self.dropout, self.dropout_seed = loss, dropout, seed
        self.known = known or KnownText(0)

    def layers(self) -> Mapping[int, nn.Module]:
        return branches(self.model)

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        seed = random_seed_from(self.dropout_seed, first)
        mode = BackwardInForward(self.loss, self.dropout, seed, share, self.parts)
        self.attend(first, count, mode)
        return losses_by_name("loss", mode.losses)

    def attend(self, first: int, count: int, mode: Mode) -> None:
        """Let the layers attend to some sequences of the text in a mode."""
        inputs = inputs_of(self.train.batch(first, count), self.model.device)
        attend_all(self.model, inputs, mode)

    def losses(self, batch: Mapping[str, Tensor]) -> Mapping[int, Tensor]:
        inputs, layers = inputs_of(batch, self.model.device), self.layers()
        known = self.known.distances(self.loss, layers, inputs)
        if known is not None:
            return known
        mode = LossOnly(self.loss)
        attend_all(self.model, inputs, mode)
        self.known.keep_distances(self.loss, layers, inputs, mode.losses)
        return mode.losses


class AlignStage(LayerStage):
    """Hidden-state alignment: every layer learns to give what the softmax model's own gives.

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
        self.paths = aligned_layers(model, loss.blocks)

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        self.model.eval()  # a dropout would show layers something else than the teacher's
        batch = self.train.batch(first, count)
        kept = list[Tensor]()
        # A divided model's layers are brought together by one backward.
        take = kept.append if isinstance(self.model, FSDPModule) else go_backward

        def receive(layer: int, loss: Tensor, weight: Tensor) -> None:
            take(loss * self.parts.factor(layer, weight, share))

        losses = self.losses(batch, receive)
        if kept:
            go_backward(torch.stack(kept).sum())
        return losses_by_name("loss", losses)

    def layers(self) -> Mapping[int, nn.Module]:
        return {layer: self.model.get_submodule(path) for layer, path in self.paths.items()}

    def losses(
        self,
        batch: Mapping[str, Tensor],
        receive: Receive = lambda layer, loss, weight: None,
    ) -> Mapping[int, Tensor]:
        inputs = inputs_of(batch, self.model.device)
        targets = self._targets(inputs)
        return alignment(self.model, self.paths, inputs, targets, self.loss, receive)

    def _targets(self, inputs: Mapping[str, Tensor]) -> dict[int, Tensor]:
        if self.teacher is not None:
            return hidden_states(self.teacher(), self.paths, inputs)
        with use_mode(self.model, Teacher()):
            return hidden_states(self.model, self.paths, inputs)


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
            return call.linear(hide_windows)
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
        known: What is known of the text to validate on; None for nothing.
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
        known: KnownText | None = None,
    ) -> None:
        super().__init__(model, train, validation)
        self.known = known or KnownText(0)
        self.loss, self.source, self.softmax = loss, source, softmax
        self.dropout, self.dropout_seed = dropout, seed

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        seed = random_seed_from(self.dropout_seed, first)
        with use_mode(self.model, self._mode(self.dropout, seed)):
            batch = to_device(self.train.batch(first, count), self.model.device)
            loss = self.loss(self.model, batch, self.source, first)
            go_backward(loss * share)
        return {"loss": loss.detach().cpu()}

    def learnt(self, first: int, count: int) -> int:
        return self.train.learnt(first, count)

    def _mode(self, dropout: float = 0.0, seed: int = 0) -> Mode:
        return PartlyLinear(self.softmax, dropout, seed) if self.softmax or dropout else Student()

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        total, tokens, mode = 0.0, 0, self._mode()
        read = self.known.student if type(mode) is Student else read_out
        with evaluation_mode(self.model), use_mode(self.model, mode):
            for batch, counts in processes.share(self.validation_batches()):
                learnt = counts * count_learnt(batch["labels"])
                given = to_device(batch, self.model.device)
                loss = TokenLoss()(self.model, given, read=read)
                total += learnt * float(loss)
                tokens += learnt
        found = processes.total({"loss": total, "tokens": tokens})
        return {"val_loss": found["loss"] / max(found["tokens"], 1)}
