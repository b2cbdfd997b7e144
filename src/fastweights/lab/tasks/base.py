"""A task: labelled sequences as a pure function of a generator, and how predictions on them are
scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fastweights.layers import upcast
from fastweights.models import (
    FastWeightsForCausalLM,
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
)
from fastweights.models.loss import IGNORE_INDEX, select_targets


@dataclass(frozen=True)
class Batch:
    """Examples: rows of inputs and of labels.

    Attributes:
        inputs: ``[n t]`` int64, pairs ``[n 2 t]`` int64, or images ``[n c s s]`` float32
        labels: ``[n t]`` int64, −100 where nothing is scored, or ``[n]`` classes
        keep: ``[n t]`` or ``[n 2 t]``, False for padding; None if there is none
    """

    inputs: Tensor
    labels: Tensor
    keep: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """These rows alone."""
        return self._each(lambda x: x[rows])

    def to(self, device: torch.device) -> Self:
        return self._each(lambda x: x.to(device, non_blocking=True))

    @property
    def targets(self) -> Tensor:
        """``[n']``: the labels that are scored, row by row."""
        return self.labels[self.labels != IGNORE_INDEX]

    @property
    def positions(self) -> Tensor:
        """``[n']``: where in its row each of `targets` stands (0 for the label of a whole row)."""
        places = (self.labels != IGNORE_INDEX).nonzero()
        return places[:, 1] if places.shape[1] > 1 else torch.zeros_like(places[:, 0])

    def _each(self, change: Any) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(x) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True)
class Score:
    """What predictions came to, as sums, so that the scores of batches add up.

    Attributes:
        nats: summed -log p(label)
        hits: ``[c]`` right predictions, by the class of the label
        labelled: ``[c]`` labels of each class
        predicted: ``[c]`` predictions of each class
    """

    nats: float
    hits: Tensor
    labelled: Tensor
    predicted: Tensor

    def __add__(self, other: Score) -> Score:
        return Score(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    @property
    def loss(self) -> float:
        """Nats per label."""
        return self.nats / int(self.labelled.sum())

    @property
    def accuracy(self) -> float:
        """Of all labels alike (micro)."""
        return int(self.hits.sum()) / int(self.labelled.sum())

    @property
    def macro_accuracy(self) -> float:
        """The mean over the classes that were labels or predictions of the accuracy on each (MAD;
        torchmetrics).
        """
        seen = (self.labelled + self.predicted) > 0
        return float((self.hits[seen] / self.labelled[seen].clamp(min=1)).double().mean())


class Task(ABC):
    """A law of examples. `draw` alone says what they are; a form below says which models learn
    them.
    """

    kind: ClassVar[type[PreTrainedModel]]

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens in the longest example."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """How many labels there are."""

    @property
    @abstractmethod
    def demands(self) -> Mapping[str, Any]:
        """Fields that a model's configuration must have for this task."""

    @abstractmethod
    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """`count` examples, the same for a generator in the same state."""

    @abstractmethod
    def logits(self, model: Any, batch: Batch) -> Tensor:
        """``[n' classes]``, of `batch.targets` only."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean of -log p over `batch.targets`."""
        return F.cross_entropy(upcast(self.logits(model, batch)), batch.targets)

    def right(self, logits: Tensor, batch: Batch) -> Tensor:
        """``[n']`` bool: which of the predictions count as right."""
        return logits.argmax(-1) == batch.targets

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Batch) -> Score:
        """The score of ``logits [n' classes]``, as `logits` returns them."""
        targets = batch.targets
        nats = F.cross_entropy(upcast(logits), targets, reduction="none").double().sum()
        return Score(
            nats=float(nats),
            hits=self._count_by_class(targets[self.right(logits, batch)]),
            labelled=self._count_by_class(targets),
            predicted=self._count_by_class(logits.argmax(-1)),
        )

    def _count_by_class(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels.cpu(), minlength=self.classes)


class TokenTask(Task):
    """A label per position, of the model's own tokens; the label of a position belongs to what is
    known there.
    """

    kind = FastWeightsForCausalLM

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Ids are below this number."""

    @property
    def classes(self) -> int:
        return self.vocabulary

    @property
    def demands(self) -> Mapping[str, Any]:
        return {"vocab_size": self.vocabulary}

    def logits(self, model: Any, batch: Batch) -> Tensor:
        x = model.model(
            input_ids=batch.inputs, attention_mask=batch.keep, use_cache=False
        ).last_hidden_state
        return model.logits(select_targets(x, batch.labels)[0])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return model(
            input_ids=batch.inputs,
            attention_mask=batch.keep,
            targets=batch.labels,
            use_cache=False,
            skip_logits=True,
        ).loss


class SequenceTask(Task):
    """One label per sequence."""

    kind = FastWeightsForSequenceClassification

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Ids are below this number."""

    @property
    def demands(self) -> Mapping[str, Any]:
        return {"vocab_size": self.vocabulary, "num_labels": self.classes}

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(input_ids=batch.inputs, attention_mask=batch.keep).logits


class ImageTask(Task):
    """One label per square image; a model's patches divide its side."""

    kind = FastWeightsForImageClassification

    @property
    @abstractmethod
    def side(self) -> int:
        """Pixels."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """3 for colour."""

    @property
    def length(self) -> int:
        return self.side**2

    @property
    def demands(self) -> Mapping[str, Any]:
        return {"image_size": self.side, "num_channels": self.channels, "num_labels": self.classes}

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(pixel_values=batch.inputs).logits
