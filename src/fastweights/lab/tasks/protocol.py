"""A protocol: a task with everything that a published number on it depends on, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel

from fastweights.lab.tasks.base import Batch, Task
from fastweights.runs.schedules import Constant, Schedule

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Segment:
    """`examples` of one task; None for as many as training asks for, every batch new."""

    task: Task
    examples: int | None


@dataclass(frozen=True)
class TrainingSettings:
    """How a protocol trains, with AdamW.

    Attributes:
        rates, decays: the grid of learning rates and weight decays; the best of it is reported
        batch: sequences per update
        epochs, steps: passes over the training examples, or updates if examples are new in
            every batch; one of them is None
        shuffled: whether an epoch has an order of its own; otherwise batches are fixed and come
            in order
        stop: test accuracy above which training ends
        best: whether the best epoch counts; otherwise the last
        clip: largest norm of the gradient; None for no clipping
        bf16: whether matrix products are in bfloat16 (parameters stay float32)
    """

    rates: tuple[float, ...]
    decays: tuple[float, ...]
    batch: int
    epochs: int | None = None
    steps: int | None = None
    schedule: Schedule = Constant()
    shuffled: bool = True
    stop: float | None = None
    best: bool = False
    clip: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    bf16: bool = False

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs = {self.epochs} and steps = {self.steps}; give one of them, None for the"
                " other"
            )


@dataclass(frozen=True)
class Backbone:
    """What a protocol puts around the mixers.

    Attributes:
        fields: of the configuration
        widths: the sizes of the model that are swept
        contenders: what is different for models of the protocol's own, by their names
    """

    fields: Fields
    widths: tuple[int, ...]
    contenders: Mapping[str, Fields] = field(default_factory=dict)


@dataclass(frozen=True)
class Protocol:
    """A benchmark at one version of its code.

    Attributes:
        validation: what may decide when to stop; None: other examples of the tests' law
        source: paper, repository and commit
        differs: what differs from the paper, from other versions, and of ours from theirs
        figures: published accuracies in per cent, by model
    """

    train: tuple[Segment, ...]
    test: tuple[Segment, ...]
    training: TrainingSettings
    backbone: Backbone
    source: str
    differs: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    validation: tuple[Segment, ...] | None = None

    @property
    def task(self) -> Task:
        """What is trained on (its longest segment)."""
        return max((segment.task for segment in self.train), key=lambda task: task.length)

    def training_set(self, seed: int) -> list[Batch]:
        """All training examples, one batch per segment. Raises ValueError where they have
        no end.
        """
        return _sets(self.train, seed, stream=0)

    def validation_set(self, seed: int) -> list[Batch]:
        """One batch per segment, none of it in the test set."""
        return _sets(self.test if self.validation is None else self.validation, seed, stream=1)

    def test_set(self, seed: int) -> list[Batch]:
        """All test examples, one batch per segment."""
        return _sets(self.test, seed, stream=2)

    def fresh(self, seed: int, step: int, count: int) -> Batch:
        """The batch of an update where every batch is new; segments take turns."""
        segment = self.train[step % len(self.train)]
        return segment.task.draw(np.random.default_rng([seed, 3, step]), count)

    def config(self, contender: str, **overrides: Any) -> PretrainedConfig:
        """The configuration of `contender`: a name in `backbone.contenders`, or any mixer with its
        own defaults.

        Args:
            overrides: other values for some fields, such as ``hidden_size`` or ``mixers``
        """
        own = self.backbone.contenders.get(contender, {})
        start = {"hidden_size": self.backbone.widths[0], "mixers": [{"name": contender}]}
        fields = {**start, **self.backbone.fields, **own, **self.task.demands, **overrides}
        kind: Any = self.task.kind.config_class
        return kind(**fields)

    def model(self, contender: str, **overrides: Any) -> PreTrainedModel:
        """A new model of `config`."""
        return self.task.kind(self.config(contender, **overrides))


def _sets(segments: tuple[Segment, ...], seed: int, stream: int) -> list[Batch]:
    sets = []
    for index, segment in enumerate(segments):
        if segment.examples is None:
            raise ValueError(
                f"segment {index} has no fixed examples, every batch is new; draw them with fresh()"
            )
        sets.append(
            segment.task.draw(np.random.default_rng([seed, stream, index]), segment.examples)
        )
    return sets
