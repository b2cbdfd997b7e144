"""The steps of a run that train: one for every stage of its recipe."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastweights.linearize.convert.modes import Student
from fastweights.linearize.distill.adapt import (
    LogitSource,
    ModelLogits,
    teacher_logits,
)
from fastweights.linearize.distill.blocks import transfer_blockwise
from fastweights.linearize.distill.comparison import LINEAR, compare_with_softmax, distances
from fastweights.linearize.distill.context import ConversionContext
from fastweights.linearize.distill.fit import TRAINED, PartialStage, fit
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    AlignmentConfig,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.stages import (
    AdaptStage,
    AlignStage,
    TransferStage,
    softmax_layers,
)
from fastweights.linearize.distill.teachers import (
    Logits,
    StoredLogits,
    TopLogits,
    open_store,
    store_logits,
)
from fastweights.linearize.distill.verb import Verb
from fastweights.runs.layout import Layout


class StageVerb(Verb):
    """Train one stage of the recipe, in the folder of its name.

    Args:
        config: The stage.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config, self.name = config, config.name

    def run_together(self, context: ConversionContext) -> bool:
        """Run in all processes, which share the training."""
        return self.run(context)

    def run(self, context: ConversionContext) -> bool:
        layers = context.linear_layers()
        if not self.train(context):
            return False
        context.finished.append(self.config)
        if context.is_divided:
            context.model = context.convert_again(layers, context.conversion.bits)
        return True

    @abstractmethod
    def train(self, context: ConversionContext) -> bool:
        """Train the model, or give it what has been trained; whether that is complete."""

    def teaches_itself(self, context: ConversionContext) -> bool:
        """Whether the model is its own teacher from the beginning of the stage to its end."""
        return context.has_own_teacher and not self.config.trained.changes_weights

    def prepare(self, context: ConversionContext) -> None:
        """Make what is trained require gradients, in a model with adapters if there are any."""
        context.model = self.config.trained.prepare(context.model, context.conversion.seed)

    def fit(self, context: ConversionContext, stage: PartialStage, layout: Layout) -> bool:
        """Train a stage in its folder."""
        return fit(
            stage,
            self.config.fit,
            context.out / self.name,
            processes=context.processes,
            layout=layout,
            reporter=context.reporter,
            stop=context.stop,
        )


class LayerVerb(StageVerb):
    """Train every layer on what the softmax model's own layer gives, and measure the model then."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.result = f"{self.name}.json"
        self.numbers = (LINEAR,)

    def run(self, context: ConversionContext) -> bool:
        if not super().run(context):
            return False
        with context.processes.first_then_others():
            if not self.is_done(context.out):
                context.write(self.name, measure_layers(context))
                self.tell(context)
        return True

    def tell(self, context: ConversionContext) -> None:
        """Say what should be known of the result."""


class TransferVerb(LayerVerb):
    """Train every branch to reproduce its softmax."""

    config: TransferConfig

    def train(self, context: ConversionContext) -> bool:
        config, text = self.config, context.train(self.config.length)
        if config.blockwise:
            return transfer_blockwise(
                context.model,
                text,
                config,
                context.out / self.name,
                processes=context.processes,
                reporter=context.reporter,
                stop=context.stop,
            )
        validation = context.validation_of(config.length)
        stage = TransferStage(
            context.model, text, validation, config.loss, config.dropout, config.fit.seed
        )
        return self.fit(context, stage, _without_recomputing(context.layout))

    def tell(self, context: ConversionContext) -> None:
        distance = "error" if self.config.loss.output else "divergence"
        before, after = (context.read(name).get(distance, 0.0) for name in ("convert", self.name))
        if after > before:
            context.reporter.note(
                f"The transfer made the layers worse: their {distance} was {before:.4g}, is"
                f" {after:.4g}. Try a lower learning rate or more steps."
            )


class AlignVerb(LayerVerb):
    """Train every layer to give the hidden states that the softmax model's own layer gives."""

    config: AlignmentConfig

    def train(self, context: ConversionContext) -> bool:
        self.prepare(context)
        stage = AlignStage(
            context.model,
            context.train(self.config.length),
            context.validation_of(self.config.length),
            self.config.loss,
            None if self.teaches_itself(context) else context.teacher(),
        )
        return self.fit(context, stage, _without_recomputing(context.layout))


def _without_recomputing(layout: Layout) -> Layout:
    """Of a stage whose losses are those of layers: each has its own graph already."""
    return replace(layout, recompute=False)


def layer_verb(config: StageConfig) -> LayerVerb:
    """Return the step that trains a stage by layer."""
    return _BY_LAYER[type(config)](config)


_BY_LAYER: Mapping[type[StageConfig], type[LayerVerb]] = {
    TransferConfig: TransferVerb,
    AlignmentConfig: AlignVerb,
}


class AdaptVerb(StageVerb):
    """Train the model as a whole to adapt to its linear layers."""

    config: AdaptationConfig

    def __init__(self, config: AdaptationConfig) -> None:
        super().__init__(config)
        self.result = f"{self.name}/{TRAINED}"

    def train(self, context: ConversionContext) -> bool:
        config, layers = self.config, context.linear_layers()
        if not self._store(context):
            return False
        self.prepare(context)
        stage = AdaptStage(
            context.model,
            context.train(config.length),
            context.validation_of(config.length),
            config.loss,
            source=self._source(context),
            softmax=softmax_layers(layers, config.softmax),
            dropout=config.dropout,
            seed=config.fit.seed,
        )
        return self.fit(context, stage, context.layout)

    def _source(self, context: ConversionContext) -> LogitSource | None:
        """The teacher; None for the model itself."""
        teacher = self.config.loss.teacher
        if teacher.top_k is not None:
            return TopLogits(self.logits_folder(context))
        if teacher.model is None and self.teaches_itself(context):
            return None
        return ModelLogits(context.logits_of(teacher.model))

    def _store(self, context: ConversionContext) -> bool:
        """Store the teacher's logits, if they are asked for; whether that is complete."""
        teacher = self.config.loss.teacher
        if teacher.top_k is None or self.is_done(context.out):
            return True
        folder, stored = self.logits_folder(context), self._stored(context, teacher.top_k)
        if open_store(folder, stored, context.processes, context.reporter):
            return True
        context.reporter.note(f"Storing the teacher's logits in {folder}")
        return store_logits(
            folder,
            stored,
            context.train(self.config.length),
            self._logits(context),
            context.processes,
            context.stop,
        )

    def _logits(self, context: ConversionContext) -> Logits:
        """What computes the teacher's logits, as many as the model has."""
        if self.config.loss.teacher.model is None and context.has_own_teacher:
            return partial(teacher_logits, context.model)
        logits = context.logits_of(self.config.loss.teacher.model)
        rows = context.rows_of(context.conversion.model)
        return lambda inputs: logits(inputs)[..., :rows]

    def logits_folder(self, context: ConversionContext) -> Path:
        """The folder of the teacher's stored logits."""
        return context.out / "teacher" / self.name

    def _stored(self, context: ConversionContext, top_k: int) -> StoredLogits:
        conversion, config = context.conversion, self.config
        return StoredLogits(
            config.loss.teacher.model or conversion.model,
            top_k,
            conversion.data,
            config.length or conversion.data.length,
            conversion.seed,
            config.fit.steps * config.fit.batch,
        )


def measure_layers(context: ConversionContext) -> dict[str, Any]:
    """Measure the model before it adapts as a whole: how well it predicts, and how far its layers
    are from their softmax, as long as that is the original one's."""
    teacher = context.original_logits()
    found = compare_with_softmax(
        context.model, context.validation.sequential_batches(4), {LINEAR: Student()}, teacher
    )
    row: Mapping[str, Any] = {LINEAR: found[LINEAR].row()}
    return {**row, **({} if teacher else distances(context.model, context.comparison_batches()))}
