"""A protocol: a task with everything that a published number on it depends on, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
from torch.nn.functional import one_hot
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fastweights.lab.tasks.base import Batch, Examples, Score, Task
from fastweights.ranges import FRACTION, NON_NEGATIVE_NUMBER, POSITIVE_INTEGER, POSITIVE_NUMBER
from fastweights.training.loop.schedules import Constant, Schedule

Fields = Mapping[str, Any]
FLOOR_EXAMPLES = 500
"""Examples that floors are measured on, a quarter of those that they are learnt from."""


@dataclass(frozen=True)
class Segment:
    """A part of a training or test set: `examples` of one task.

    Attributes:
        task: The task that the examples are drawn from.
        examples: Number of examples; None for as many as training asks for, every batch new.
    """

    task: Task
    examples: int | None


@dataclass(frozen=True)
class TrainingSettings:
    """The settings with which a protocol trains a model, by AdamW.

    Attributes:
        rates, decays: The grid of learning rates and weight decays; the best combination is
            reported.
        batch: Sequences per update.
        epochs, steps: Passes over the training examples, or updates if the examples are new in
            every batch; one of them is None.
        schedule: How the learning rate changes during training.
        shuffled: Whether every epoch has its own order; otherwise batches are fixed and come in
            order.
        stop: Validation accuracy above which training ends.
        best: Whether the best epoch counts; otherwise the last.
        clip: Largest norm of the gradient; None for no clipping.
        betas: AdamW's coefficients of the running means.
        bf16: Whether matrix products are in bfloat16 (parameters stay float32).
        repeats: How often an epoch shows each of its examples, with other draws; it shows so much
            fewer of them (repeated augmentation; Hoffer et al., 2020).
        matrices_only: Whether weight decay spares norms, biases and embeddings.

    Raises:
        ValueError: If both or neither of `epochs` and `steps` are given, or a number lies outside
            of its range.
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
    repeats: int = 1
    matrices_only: bool = False

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs = {self.epochs} and steps = {self.steps}; give one of them, None for the"
                " other"
            )
        for name in ("batch", "epochs", "steps", "repeats"):
            if getattr(self, name) is not None:
                POSITIVE_INTEGER.require(**{name: getattr(self, name)})
        if self.clip is not None:
            POSITIVE_NUMBER.require(clip=self.clip)
        if self.stop is not None:
            NON_NEGATIVE_NUMBER.require(stop=self.stop)
        POSITIVE_NUMBER.require_all(rates=self.rates)
        NON_NEGATIVE_NUMBER.require_all(decays=self.decays)
        FRACTION.require_all(betas=self.betas)


@dataclass(frozen=True)
class Backbone:
    """The model that a protocol puts around the mixers.

    Attributes:
        fields: Fields of the model's configuration.
        widths: Sizes of the model that are swept.
        contenders: Further fields for the protocol's own models, by the models' names; all fields
            of one of another library's, with transformers' `model_type`.
    """

    fields: Fields
    widths: tuple[int, ...]
    contenders: Mapping[str, Fields] = field(default_factory=dict)


@dataclass(frozen=True)
class Protocol:
    """A benchmark as one version of its published code runs it: tasks, training and model.

    Attributes:
        train: What is trained on.
        test: What accuracy is reported on.
        training: How the model is trained.
        backbone: The model around the mixers.
        source: Paper, repository and commit.
        differs: What differs between the paper, other versions of its code, and this protocol.
        figures: Published accuracies in per cent, by model.
        validation: What may decide when to stop; None for other examples with the distribution of
            the tests.
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
        """The training task with the longest sequences."""
        return max((segment.task for segment in self.train), key=lambda task: task.length)

    def training_set(self, seed: int) -> list[Examples]:
        """Choose all training examples, segment by segment.

        Raises:
            ValueError: If a segment has no fixed number of examples.
        """
        return _sets(self.train, seed, stream=0)

    def validation_set(self, seed: int) -> list[Examples]:
        """Choose all validation examples, segment by segment, none of them in the test set."""
        return _sets(self.test if self.validation is None else self.validation, seed, stream=1)

    def test_set(self, seed: int) -> list[Examples]:
        """Choose all test examples, segment by segment."""
        return _sets(self.test, seed, stream=2)

    def fresh(self, seed: int, step: int, count: int) -> Batch:
        """Draw the batch of one update where every batch is new; segments take turns."""
        segment = self.train[step % len(self.train)]
        return segment.task.draw(np.random.default_rng([seed, 3, step]), count)

    def floors(self, macro: bool = False) -> dict[str, float]:
        """Measure what predictors reach on test examples that make next to nothing of a sequence.

        Args:
            macro: Whether classes count alike, instead of labels.

        Returns:
            Accuracies from 0 to 1 by the predictors' names, which `floors` describes.
        """
        totals = dict[str, Score]()
        for index, segment in enumerate(self.test):
            source = self.train[index % len(self.train)]
            known = source.task.draw(np.random.default_rng([0, 4, index]), 4 * FLOOR_EXAMPLES)
            shown = segment.task.draw(np.random.default_rng([0, 2, index]), FLOOR_EXAMPLES)
            for name, guess in segment.task.guesses(known, shown).items():
                found = segment.task.score(one_hot(guess, segment.task.classes).float(), shown)
                totals[name] = totals[name] + found if name in totals else found
        return {
            name: score.macro_accuracy if macro else score.accuracy
            for name, score in totals.items()
        }

    def sized(self, **sizes: Any) -> Protocol:
        """Return the protocol with tasks of another size, which no published figure is about.

        Args:
            sizes: Fields of all its tasks, such as ``length`` or ``pairs``.

        Raises:
            ValueError: If a task has no such field, or cannot have this size.
        """
        known = {field.name for field in fields(cast(Any, self.task))}
        if unknown := sorted(sizes.keys() - known):
            raise ValueError(
                f"{type(self.task).__name__} takes {', '.join(sorted(known))}, not"
                f" {', '.join(unknown)}"
            )
        parts = {
            name: None if segments is None else tuple(_resized(one, sizes) for one in segments)
            for name, segments in (
                ("train", self.train),
                ("test", self.test),
                ("validation", self.validation),
            )
        }
        return replace(self, **parts, figures={} if sizes else self.figures)

    def config(self, contender: str, **overrides: Any) -> PretrainedConfig:
        """Build the configuration of `contender`: a name in `backbone.contenders`, or any mixer's
        name.

        Args:
            contender: The model; a mixer has its own default arguments.
            overrides: Other values for some fields, such as ``hidden_size`` or ``mixers``.
        """
        own = self.backbone.contenders.get(contender, {})
        if "model_type" in own:
            fields: dict[str, Any] = {**own, "num_labels": self.task.classes, **overrides}
            return AutoConfig.for_model(**fields)
        start = {"hidden_size": self.backbone.widths[0], "mixers": [{"name": contender}]}
        fields = {**start, **self.backbone.fields, **own, **self.task.demands, **overrides}
        kind: Any = self.task.kind.config_class
        return kind(**fields)

    def model(self, contender: str, **overrides: Any) -> PreTrainedModel:
        """Build a new model from the configuration that `config` returns for the same arguments."""
        return self.task.build(self.config(contender, **overrides))


def _resized(segment: Segment, sizes: Mapping[str, Any]) -> Segment:
    return replace(segment, task=replace(cast(Any, segment.task), **sizes))


def _sets(segments: tuple[Segment, ...], seed: int, stream: int) -> list[Examples]:
    sets = []
    for index, segment in enumerate(segments):
        if segment.examples is None:
            raise ValueError(
                f"segment {index} has no fixed set of examples, since every batch is new; draw"
                " with fresh()"
            )
        sets.append(
            segment.task.examples(np.random.default_rng([seed, stream, index]), segment.examples)
        )
    return sets
