"""The two training stages of a linearization, on text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.distill.adapt import TokenLoss
from fastweights.linearize.distill.fit import PartialStage
from fastweights.linearize.distill.transfer import (
    BackwardInForward,
    LossOnly,
    TransferLoss,
    attend_all,
    only_branches,
)
from fastweights.runs.devices import to_device
from fastweights.runs.evaluation import evaluation_mode
from fastweights.runs.processes import Alone, Processes
from fastweights.runs.report import Counts
from fastweights.runs.seeds import random_seed_from
from fastweights.runs.stage import go_backward
from fastweights.text import IGNORE_INDEX
from fastweights.text.documents import Batches, Stream


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

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        seed = random_seed_from(self.dropout_seed, first)
        mode = BackwardInForward(self.loss, self.dropout, seed, share)
        attend_all(self.model, self._read(self.train.batch(first, count)), mode)
        return _losses_by_name("loss", mode.losses)

    def clipped_parts(self) -> Iterable[nn.Module]:
        return branches(self.model).values()

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        totals, tokens = dict[str, float](), 0
        with evaluation_mode(self.model):
            batches = self.validation.sequential_batches(self.together)
            for batch, counts in processes.share(batches):
                mode, count = LossOnly(self.loss), counts * batch["input_ids"].numel()
                attend_all(self.model, self._read(batch), mode)
                tokens += count
                for name, loss in _losses_by_name("val_loss", mode.losses).items():
                    totals[name] = totals.get(name, 0.0) + count * float(loss)
        found = processes.total({**totals, "tokens": tokens})
        tokens = found.pop("tokens")
        return {name: total / tokens for name, total in found.items()}

    def _read(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.on_device({name: tensor for name, tensor in batch.items() if name != "labels"})


def _losses_by_name(name: str, losses: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The mean, and every layer's own."""
    mean = torch.stack([loss.cpu() for loss in losses.values()]).mean()
    return {name: mean, **{f"{name}/{layer}": loss.cpu() for layer, loss in sorted(losses.items())}}


class AdaptStage(TextStage):
    """Stage two, low-rank adaptation of a model that `prepare_adaptation` has prepared.

    ``val_loss`` is the loss of the next token, in nats.
    """

    def __init__(
        self, model: Any, train: Batches, validation: Stream, loss: TokenLoss = TokenLoss()
    ) -> None:
        super().__init__(model, train, validation)
        self.loss = loss

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        loss = self.loss(self.model, self.on_device(self.train.batch(first, count)))
        go_backward(loss * share)
        return {"loss": loss.detach().cpu()}

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        total, tokens = 0.0, 0
        with evaluation_mode(self.model):
            batches = self.validation.sequential_batches(self.together)
            for batch, counts in processes.share(batches):
                learnt = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
                loss = float(TokenLoss()(self.model, self.on_device(batch)))
                total += loss * learnt if counts and learnt else 0.0
                tokens += counts * learnt
        found = processes.total({"loss": total, "tokens": tokens})
        return {"val_loss": found["loss"] / max(found["tokens"], 1)}
