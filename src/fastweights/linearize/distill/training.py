"""The steps of a run that train: one for every stage of its recipe."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.modes import Student, Teacher
from fastweights.linearize.distill.adapt import LogitSource, ModelLogits
from fastweights.linearize.distill.blocks import transfer_blockwise
from fastweights.linearize.distill.fit import TRAINED, PartialStage, fit
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    AlignmentConfig,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.run import ConversionRun, logit_count
from fastweights.linearize.distill.stages import (
    AdaptStage,
    AlignStage,
    TransferStage,
    softmax_layers,
)
from fastweights.linearize.distill.step import ConversionStep
from fastweights.linearize.distill.student import StudentModel
from fastweights.linearize.distill.teachers import (
    Logits,
    StoredLogits,
    TopLogits,
    open_store,
    store_logits,
)
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.linearize.evaluate.comparison import (
    LINEAR,
    SOFTMAX,
    WEIGHTS,
    DistanceMeter,
    compare_with_softmax,
)
from fastweights.linearize.evaluate.evaluation import comparison_batches
from fastweights.linearize.evaluate.known import KnownText
from fastweights.linearize.evaluate.logits import ReadOut, teacher_logits, unwrap_adapters
from fastweights.training.loop.layout import Layout

KEPT, ROOM = 32, 1 << 28
"""Numbers that a step keeps for its backward pass, for each channel of a token in a block; and how
many it may keep of whatever model."""


class TrainStep(ConversionStep):
    """Train one stage of the recipe, in the folder of its name.

    Args:
        config: The stage.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config, self.name = config, config.name

    def run_together(self, student: StudentModel) -> StudentModel | None:
        """Run in all processes, which share the training."""
        return self.run(student)

    def run(self, student: StudentModel) -> StudentModel | None:
        layers, run = student.linear_layers(), student.run
        trained = self.train(student)
        if trained is None:
            return None
        trained = trained.after(self.config)
        if not run.is_divided:
            return trained
        return trained.with_model(trained.convert_again(layers, run.conversion.bits))

    @abstractmethod
    def train(self, student: StudentModel) -> StudentModel | None:
        """Train the model, or give it what has been trained; None if that is not complete."""

    def teaches_itself(self, student: StudentModel) -> bool:
        """Whether the model is its own teacher from the beginning of the stage to its end."""
        return student.has_own_teacher and not self.config.trained.changes_weights

    def prepare(self, student: StudentModel) -> StudentModel:
        """Make what is trained require gradients, in a model with adapters if there are any."""
        seed = student.run.conversion.seed
        return student.with_model(self.config.trained.prepare(student.model, seed))

    def fit(
        self, student: StudentModel, stage: PartialStage, layout: Layout
    ) -> StudentModel | None:
        """Train a stage in its folder; None if that is not complete."""
        run = student.run
        session = replace(run, layout=layout)
        is_complete = fit(stage, self.config.fit, run.out / self.name, session)
        return student if is_complete else None


class LayerStep(TrainStep):
    """Train every layer on what the softmax model's own layer gives, and measure the model then."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.result = f"{self.name}.json"
        self.numbers = (LINEAR,)

    def run(self, student: StudentModel) -> StudentModel | None:
        trained = super().run(student)
        if trained is None:
            return None
        with trained.run.processes.first_then_others():
            if not self.is_done(trained.run.out):
                trained.run.write(self.name, measure_layers(trained, self.config))
        return trained


class TransferStep(LayerStep):
    """Train every branch to reproduce its softmax."""

    config: TransferConfig

    def train(self, student: StudentModel) -> StudentModel | None:
        run, config, text = student.run, self.config, student.text.train(self.config.length)
        if config.blockwise:
            out, session = run.out / self.name, replace(run, layout=Layout())
            is_complete = transfer_blockwise(student.model, text, config, out, session)
            return student if is_complete else None
        validation = student.text.validation_beside(config, config.length)
        stage = TransferStage(
            student.model, text, validation, config.loss, config.dropout, config.fit.seed, run.known
        )
        return self.fit(student, stage, _without_recomputing(run.layout))


class AlignStep(LayerStep):
    """Train every layer to give the hidden states that the softmax model's own layer gives."""

    config: AlignmentConfig

    def train(self, student: StudentModel) -> StudentModel | None:
        student = self.prepare(student)
        stage = AlignStage(
            student.model,
            student.text.train(self.config.length),
            student.text.validation_beside(self.config, self.config.length),
            self.config.loss,
            None if self.teaches_itself(student) else student.loader.teacher(),
        )
        return self.fit(student, stage, _without_recomputing(student.run.layout))


def _without_recomputing(layout: Layout) -> Layout:
    """Of a stage whose losses are those of layers: each has its own graph already."""
    return replace(layout, recompute=False)


class AdaptStep(TrainStep):
    """Train the model as a whole to adapt to its linear layers."""

    config: AdaptationConfig

    def __init__(self, config: AdaptationConfig) -> None:
        super().__init__(config)
        self.result = f"{self.name}/{TRAINED}"

    def train(self, student: StudentModel) -> StudentModel | None:
        config, layers = self.config, student.linear_layers()
        if not self._store(student):
            return None
        student = self.prepare(student)
        stage = AdaptStage(
            student.model,
            student.text.train(config.length),
            student.text.validation_beside(config, config.length),
            config.loss,
            source=self._source(student),
            softmax=softmax_layers(layers, config.softmax),
            dropout=config.dropout,
            seed=config.fit.seed,
            known=student.run.known,
        )
        return self.fit(student, stage, self._layout(student))

    def _layout(self, student: StudentModel) -> Layout:
        """That of the run, which computes blocks again where all that a step keeps would be large,
        and far larger than the weights."""
        run, model = student.run, unwrap_adapters(student.model)
        layout, sizes = run.layout, model.config.get_text_config()
        sequences = self.config.fit.sequences_at_once(run.processes)
        tokens = sequences * (self.config.length or run.conversion.data.length)
        kept = KEPT * tokens * sizes.hidden_size * sizes.num_hidden_layers
        if model.supports_gradient_checkpointing and kept > max(ROOM, 2 * model.num_parameters()):
            return replace(layout, recompute=True)
        return layout

    def _source(self, student: StudentModel) -> LogitSource | None:
        """The teacher; None for the model itself."""
        teacher = self.config.loss.teacher
        if teacher.top_k is not None:
            return TopLogits(self.logits_folder(student.run))
        if teacher.model is None and self.teaches_itself(student):
            return None
        return ModelLogits(student.loader.reader_of(teacher.model))

    def _store(self, student: StudentModel) -> bool:
        """Store the teacher's logits, if they are asked for; whether that is complete."""
        teacher, run = self.config.loss.teacher, student.run
        if teacher.top_k is None or self.is_done(run.out):
            return True
        folder, stored = self.logits_folder(run), self._stored(run, teacher.top_k)
        if open_store(folder, stored, run.processes, run.reporter):
            return True
        run.reporter.note(f"Storing the teacher's logits in {folder}")
        train, logits = student.text.train(self.config.length), self._logits(student)
        return store_logits(folder, stored, train, logits, run.processes, run.stop)

    def _logits(self, student: StudentModel) -> Logits:
        """What computes the teacher's logits, as many as the model has."""
        if self.config.loss.teacher.model is None and student.has_own_teacher:
            return partial(teacher_logits, student.model)
        read = student.loader.reader_of(self.config.loss.teacher.model)
        rows = logit_count(student.run.conversion.model)
        return lambda inputs: read(inputs).next_logits()[..., :rows]

    def logits_folder(self, run: ConversionRun) -> Path:
        """The folder of the teacher's stored logits."""
        return run.out / "teacher" / self.name

    def _stored(self, run: ConversionRun, top_k: int) -> StoredLogits:
        conversion, config = run.conversion, self.config
        return StoredLogits(
            config.loss.teacher.model or conversion.model,
            top_k,
            conversion.data,
            config.length or conversion.data.length,
            conversion.seed,
            config.fit.steps * config.fit.batch,
        )


def step_of(config: StageConfig) -> TrainStep:
    """Return the step that trains a stage."""
    if isinstance(config, TransferConfig):
        return TransferStep(config)
    return AdaptStep(config) if isinstance(config, AdaptationConfig) else AlignStep(config)


def measure_layers(student: StudentModel, stage: StageConfig | None) -> Mapping[str, Any]:
    """Measure the model before it adapts as a whole: how well it predicts, and how far its layers
    are from their softmax, as long as that is the original one's.

    Args:
        student: The model.
        stage: What it is measured beside; None for nothing.

    Returns:
        ``linear`` with, if less than the validation text is read, the number of its `tokens` and
        what it loses on them, `above_softmax`, in nats per token; and the layers' distances.
    """
    model, known = student.model, student.run.known
    meter = DistanceMeter(math.inf if student.run.conversion.recipe.compares_weights else WEIGHTS)
    original = student.changed_original()

    def softmax(inputs: Mapping[str, Tensor]) -> ReadOut:
        if original is not None:
            return known.student(original(), inputs)
        return _read_and_measure(model, inputs, meter, known)

    whole = student.text.validation
    read = whole if stage is None else student.text.validation_beside(stage)
    batches = comparison_batches(read, unwrap_adapters(model).config)
    compared = student.run.follow(batches, "comparing with softmax")
    modes = {SOFTMAX: Teacher(), LINEAR: Student()}
    found = compare_with_softmax(model, compared, modes, softmax, known)
    row = found[LINEAR].row()
    if read.tokens < whole.tokens:
        loses = found[LINEAR].loss.mean - found[SOFTMAX].loss.mean
        row |= {"tokens": found[LINEAR].losses.size, "above_softmax": loses}
    return {LINEAR: row, **meter.distances()}


def _read_and_measure(
    model: Any, inputs: Mapping[str, Tensor], meter: DistanceMeter, known: KnownText
) -> ReadOut:
    """Read as softmax does, with the layers' distances beside it, as far as they are not known."""
    kind, layers = TransferLoss(), branches(model)
    there = known.distances(kind, layers, inputs)
    if there is not None and not meter.asks(model, inputs["input_ids"]):
        meter.errors.extend(map(float, there.values()))
        return known.softmax(model, inputs)
    read = known.softmax(model, inputs, meter)
    known.keep_distances(kind, layers, inputs, meter.last)
    return read
