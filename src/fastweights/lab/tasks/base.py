"""Tasks: labelled sequences as a pure function of a generator, and the scores of predictions on
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, PreTrainedModel

from fastweights.lab.tasks.floors import (
    Predictions,
    label_seen_most,
    linear_classifier,
    most_frequent_label,
    n_gram_labels,
)
from fastweights.layers import upcast
from fastweights.models import (
    FastWeightsForCausalLM,
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
)
from fastweights.models.loss import IGNORE_INDEX, select_targets


@dataclass(frozen=True)
class BatchShare:
    """What one of several processes reads of every batch: as many of its first examples as of its
    last, so that those that are mixed with each other, from either end, are read together.

    Attributes:
        index: Number of the process, from 0.
        count: Number of processes.
    """

    index: int = 0
    count: int = 1

    def __call__(self, rows: Tensor) -> Tensor:
        """Return this process's part of ``rows [n]``."""
        places = torch.arange(len(rows))
        pairs = torch.minimum(places, places.flip(0))
        return rows[pairs * self.count // max(-(-len(rows) // 2), 1) == self.index]


class Examples(ABC):
    """Labelled examples of a task, in memory or read when they are asked for."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(
        self, rows: Iterable[Tensor], seed: Sequence[int], share: BatchShare = BatchShare()
    ) -> Iterator[Batch]:
        """Yield this process's share of the batch of each of ``rows [n]``.

        Args:
            rows: Numbers of examples; number + len is the same example, with other draws.
            seed: Seed of what is drawn anew whenever an example is read, such as its crop.
            share: The part of every batch that is read.
        """


@dataclass(frozen=True)
class Batch(Examples):
    """A batch of examples: rows of inputs and of labels.

    Attributes:
        inputs: ``[n t]`` int64, pairs ``[n 2 t]`` int64, or images ``[n c s s]`` float32.
        labels: ``[n t]`` int64, −100 where nothing is scored, or ``[n]`` classes.
        keep: ``[n t]`` or ``[n 2 t]``, False for padding; None if there is none.
        mixed: ``[n classes]``, shares of the classes in images that are mixed in training; None if
            they are not.
    """

    inputs: Tensor
    labels: Tensor
    keep: Tensor | None = None
    mixed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """Return the batch of the chosen rows."""
        return self._each(lambda x: x[rows])

    def batches(
        self, rows: Iterable[Tensor], seed: Sequence[int], share: BatchShare = BatchShare()
    ) -> Iterator[Batch]:
        del seed
        return (self[share(chosen) % len(self)] for chosen in rows)

    def to(self, device: torch.device) -> Self:
        return self._each(lambda x: x.to(device, non_blocking=True))

    @property
    def targets(self) -> Tensor:
        """The labels that are scored, ``[n']``, row by row."""
        return self.labels[self.labels != IGNORE_INDEX]

    @property
    def positions(self) -> Tensor:
        """The position ``[n']`` of each of `targets` in its row (0 for the label of a whole
        row)."""
        places = (self.labels != IGNORE_INDEX).nonzero()
        return places[:, 1] if places.shape[1] > 1 else torch.zeros_like(places[:, 0])

    def _each(self, change: Any) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(x) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True)
class Score:
    """The score of predictions, kept as sums so that the scores of batches add up.

    Attributes:
        nats: Sum of -log p(label).
        hits: ``[c]``, number of right predictions by the class of the label.
        labelled: ``[c]``, number of labels of each class.
        predicted: ``[c]``, number of predictions of each class.
    """

    nats: float
    hits: Tensor
    labelled: Tensor
    predicted: Tensor

    def __add__(self, other: Score) -> Score:
        return Score(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    @classmethod
    def nothing(cls, classes: int) -> Score:
        """Return the score of no predictions."""
        return cls(0.0, *(torch.zeros(classes, dtype=torch.long) for _ in range(3)))

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Score:
        """Return the score whose `numbers` these are."""
        counts = torch.tensor([x for name, x in numbers.items() if name != "nats"]).long()
        return cls(numbers["nats"], *counts.chunk(3))

    @property
    def numbers(self) -> dict[str, float]:
        """All sums by name, to be added up over processes."""
        counts = torch.cat([self.hits, self.labelled, self.predicted]).tolist()
        return {"nats": self.nats, **{f"{place}": float(x) for place, x in enumerate(counts)}}

    @property
    def loss(self) -> float:
        """The mean loss per label, in nats."""
        return self.nats / int(self.labelled.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of all labels that were predicted right (micro average)."""
        return int(self.hits.sum()) / int(self.labelled.sum())

    @property
    def macro_accuracy(self) -> float:
        """The mean of the accuracies of the classes (macro average; MAD, as torchmetrics computes
        it).

        Classes that were neither labels nor predictions are left out.
        """
        seen = (self.labelled + self.predicted) > 0
        return float((self.hits[seen] / self.labelled[seen].clamp(min=1)).double().mean())


class Task(ABC):
    """A distribution of labelled examples: the base class of all tasks.

    `draw` alone says what the examples are; the subclasses below say which kind of model learns
    them.

    Attributes:
        kind: The class of model that learns the task.
    """

    kind: ClassVar[type[PreTrainedModel]]

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens in the longest example."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """Number of different labels."""

    @property
    @abstractmethod
    def demands(self) -> Mapping[str, Any]:
        """Fields that a model's configuration must have for this task."""

    def build(self, config: Any) -> PreTrainedModel:
        """Build a new model that learns the task."""
        return self.kind(config)

    @abstractmethod
    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """Draw `count` examples; a generator in the same state draws the same ones."""

    def examples(self, generator: np.random.Generator, count: int) -> Examples:
        """Choose `count` examples, as `draw` does; a task of files need not read them all."""
        return self.draw(generator, count)

    @abstractmethod
    def logits(self, model: Any, batch: Batch) -> Tensor:
        """Compute the model's logits ``[n' classes]`` for `batch.targets` only."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Compute the mean of -log p over `batch.targets`."""
        return F.cross_entropy(upcast(self.logits(model, batch)), batch.targets)

    def guesses(self, train: Batch, test: Batch) -> Predictions:
        """Predict `test.targets` ``[n']`` in ways that make next to nothing of the sequence."""
        return {"most frequent label": most_frequent_label(train.targets, len(test.targets))}

    def right(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mark in a mask ``[n']`` which of the predictions count as right."""
        return logits.argmax(-1) == batch.targets

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Batch) -> Score:
        """Score ``logits [n' classes]``, as `logits` returns them."""
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
    """A task with a label per position, among the model's own tokens.

    The label of a position is predicted from the tokens up to that position.
    """

    kind = FastWeightsForCausalLM

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of different tokens; ids are below it."""

    @property
    def classes(self) -> int:
        return self.vocabulary

    @property
    def demands(self) -> Mapping[str, Any]:
        return {"vocab_size": self.vocabulary}

    def guesses(self, train: Batch, test: Batch) -> Predictions:
        return {
            **super().guesses(train, test),
            "a label that was seen": label_seen_most(train.targets, (test.inputs, test.labels)),
            **n_gram_labels((train.inputs, train.labels), (test.inputs, test.labels)),
        }

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
    """A task with one label per sequence."""

    kind = FastWeightsForSequenceClassification

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of different tokens; ids are below it."""

    @property
    def demands(self) -> Mapping[str, Any]:
        return {"vocab_size": self.vocabulary, "num_labels": self.classes}

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(input_ids=batch.inputs, attention_mask=batch.keep).logits


class ImageTask(Task):
    """A task with one label per square image, whose side the model's patches divide."""

    kind = FastWeightsForImageClassification

    @property
    @abstractmethod
    def side(self) -> int:
        """The side of an image in pixels."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Number of colour channels: 3 for colour, 1 for grey."""

    @property
    def length(self) -> int:
        return self.side**2

    @property
    def demands(self) -> Mapping[str, Any]:
        return {"image_size": self.side, "num_channels": self.channels, "num_labels": self.classes}

    def guesses(self, train: Batch, test: Batch) -> Predictions:
        pixels = linear_classifier((train.inputs, train.labels), test.inputs, self.classes)
        return {**super().guesses(train, test), "linear in the pixels": pixels}

    def build(self, config: Any) -> PreTrainedModel:
        """Build a new model of this or another library."""
        return AutoModelForImageClassification.from_config(config)

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return model(pixel_values=batch.inputs).logits
