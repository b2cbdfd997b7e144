"""The steps of a conversion's run, in order: the files that each writes, and the model that it
leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastweights.linearize.convert.modes import Student
from fastweights.linearize.distill.adapt import (
    load_adapters,
    next_logits,
    prepare_adaptation,
)
from fastweights.linearize.distill.blocks import transfer_blockwise
from fastweights.linearize.distill.comparison import (
    LINEAR,
    SOFTMAX,
    ablations,
    compare_with_softmax,
    difference_with_full_window,
    distances,
)
from fastweights.linearize.distill.context import ConversionContext
from fastweights.linearize.distill.fit import TRAINED, Fit, PartialStage, fit
from fastweights.linearize.distill.methods import AdaptationConfig, TransferConfig
from fastweights.linearize.distill.ranking import damage_by_layer, most_damaging_layers
from fastweights.linearize.distill.report import write_report
from fastweights.linearize.distill.stages import AdaptStage, TransferStage
from fastweights.runs.checkpoint import no_progress_bars, save_model
from fastweights.runs.errors import CheckpointError
from fastweights.runs.files import atomic_folder, read_json
from fastweights.runs.layout import Layout
from fastweights.train.adapters import merge_adapters


class Verb(ABC):
    """One step of a run, which can be stopped or killed at any moment and repeated.

    It resumes where it was, and reads finished results from the run's folder.

    Attributes:
        name: Name of the step.
        result: The file or folder that exists once it is done.
    """

    name: ClassVar[str]
    """What the command calls it."""
    result: ClassVar[str]
    """The file or folder, in the run's folder, that is there when it is done."""

    numbers: ClassVar[tuple[str, ...]] = ()
    """What the result holds, if it is a JSON file."""

    def check(self, out: Path) -> None:
        """Check the result in the run's folder `out`, if it is a JSON file and there.

        Raises:
            CheckpointError: If it is damaged.
        """
        path = out / self.result
        if not self.numbers or not path.exists():
            return
        found = read_json(path)
        there = found if isinstance(found, dict) else {}
        for name in self.numbers:
            if name not in there:
                raise CheckpointError(
                    f"{path} is damaged (it has no {name!r}); remove it, and the same command"
                    " writes it again"
                )

    def is_done(self, out: Path) -> bool:
        """Whether its result is in the run's folder `out`."""
        return (out / self.result).exists()

    @abstractmethod
    def run(self, context: ConversionContext) -> bool:
        """Write what is not written yet, and leave the model as the next step needs it.

        Returns:
            False if it was stopped before the end.
        """

    def run_together(self, context: ConversionContext) -> bool:
        """Run in all processes: the first one writes the results, which the others then read."""
        with context.processes.first_then_others():
            return self.run(context)


class PlanVerb(Verb):
    """Compute the numbers of the conversion before anything is done."""

    name, result = "plan", "plan.json"
    numbers = ("model_type", "parameters", "converted", "left", "break_even")

    def run(self, context: ConversionContext) -> bool:
        if not self.is_done(context.out):
            plan = context.plan
            context.write("plan", {**asdict(plan), "break_even": plan.break_even})
        return True


class ConvertVerb(Verb):
    """Convert the model, test the conversion, and measure the loss before training."""

    name, result = "convert", "convert.json"
    numbers = (LINEAR, "error")

    def run(self, context: ConversionContext) -> bool:
        if not self.is_done(context.out):
            context.write("convert", {**_self_test(context), **_before_adaptation(context)})
        return True


class TransferVerb(Verb):
    """Stage one: train every branch to reproduce its softmax."""

    name, result = "transfer", "transfer.json"
    numbers = (LINEAR, "error")

    def run(self, context: ConversionContext) -> bool:
        config = context.conversion.method.transfer
        if config is None:
            return True
        if not self._train(context, config):
            return False
        with context.processes.first_then_others():
            if not self.is_done(context.out):
                context.write("transfer", _before_adaptation(context))
                _tell_if_worse(context, "error" if config.loss.output else "divergence")
        return True

    def run_together(self, context: ConversionContext) -> bool:
        """Run in all processes, which share the training."""
        return self.run(context)

    def _train(self, context: ConversionContext, config: TransferConfig) -> bool:
        folder = context.out / "transfer"
        if config.blockwise:
            return transfer_blockwise(
                context.model,
                context.train,
                config,
                folder,
                processes=context.processes,
                reporter=context.reporter,
                stop=context.stop,
            )
        stage = TransferStage(
            context.model,
            context.train,
            context.validation,
            config.loss,
            config.dropout,
            config.fit.seed,
        )
        layout = replace(context.layout, recompute=False)  # it goes backward inside its forward
        complete = _fit(stage, config.fit, folder, context, layout)
        if complete and context.is_divided:
            context.model = context.convert_again(context.linear_layers(), context.conversion.bits)
        return complete


class RankLayersVerb(Verb):
    """Measure the damage that each layer does, and make the worst layers softmax again."""

    name, result = "rank-layers", "ranking.json"
    numbers = ("damage", "softmax")

    def run(self, context: ConversionContext) -> bool:
        kept = context.conversion.softmax_layers
        if not self.is_done(context.out):
            damage = damage_by_layer(context.model, _batches_on_device(context))
            context.write(
                "ranking", {"damage": damage, "softmax": most_damaging_layers(damage, kept)}
            )
        if kept:
            softmax = context.read("ranking")["softmax"]
            layers = [layer for layer in context.linear_layers() if layer not in softmax]
            context.model = context.convert_again(layers, context.conversion.bits)
        return True


class FinetuneVerb(Verb):
    """Stage two: train the whole model to adapt to its linear layers."""

    name, result = "finetune", f"finetune/{TRAINED}"

    def run(self, context: ConversionContext) -> bool:
        config = context.conversion.method.adapt
        if config is None:
            return True
        layers, begun = context.linear_layers(), context.branch_parameters()
        if not self._train(context, config):
            return False
        if not context.is_divided:
            return True
        context.model = context.convert_again(layers, context.conversion.bits, begun)
        return self._train(context, config)  # which reads what has been trained

    def _train(self, context: ConversionContext, config: AdaptationConfig) -> bool:
        context.model = prepare_adaptation(
            context.model, config.lora, config.branches, context.conversion.seed
        )
        stage = AdaptStage(context.model, context.train, context.validation, config.loss)
        return _fit(stage, config.fit, context.out / "finetune", context, context.layout)

    def run_together(self, context: ConversionContext) -> bool:
        """Run in all processes, which share the training."""
        return self.run(context)


class EvaluateVerb(Verb):
    """Compare the finished model with its softmax, and with each side of its attention alone."""

    name, result = "eval", "evaluation.json"
    numbers = (SOFTMAX, LINEAR)

    def run(self, context: ConversionContext) -> bool:
        if self.is_done(context.out):
            return True
        found = compare_with_softmax(
            context.model,
            context.validation.sequential_batches(4),
            ablations(context.model),
            _original_teacher(context) if context.conversion.trains_all_weights else None,
        )
        context.out.joinpath("positions").mkdir(exist_ok=True)
        for name, compared in found.items():
            compared.loss.save(context.out / "positions" / f"{name}.json")
        context.write("evaluation", {name: compared.row() for name, compared in found.items()})
        return True


class ReportVerb(Verb):
    """Write all numbers and pictures as one page."""

    name, result = "report", "report/report.html"

    def run(self, context: ConversionContext) -> bool:
        if not self.is_done(context.out):
            batch = next(context.validation.sequential_batches(1))
            with atomic_folder(context.out / "report") as folder:
                write_report(context.model, batch, context.out, folder)
        return True


class ExportVerb(Verb):
    """Write the whole model with its adapters merged.

    It is the last step, since merged adapters cannot be switched off any more.
    """

    name, result = "export", "model"

    def run(self, context: ConversionContext) -> bool:
        if self.is_done(context.out):
            return True
        if _has_adapters(context):
            with atomic_folder(context.out / "adapter") as folder:
                context.model.save_pretrained(folder)
        context.model = self._merge(context)
        with no_progress_bars(), atomic_folder(context.out / "model") as folder:
            save_model(context.model, context.tokenizer, folder)
        return True

    def _merge(self, context: ConversionContext) -> Any:
        """The model with its adapters merged, in weights that are not quantised."""
        if context.conversion.bits is None:
            return merge_adapters(context.model)
        layers = context.linear_layers()
        if not _has_adapters(context):
            return context.convert_again(layers, None)
        original = context.linearize_original(layers, None)
        return merge_adapters(load_adapters(original, context.out / "adapter"))


VERBS: tuple[Verb, ...] = (
    PlanVerb(),
    ConvertVerb(),
    TransferVerb(),
    RankLayersVerb(),
    FinetuneVerb(),
    EvaluateVerb(),
    ReportVerb(),
    ExportVerb(),
)
"""The parts of a run in their order."""


def _fit(
    stage: PartialStage, config: Fit, folder: Path, context: ConversionContext, layout: Layout
) -> bool:
    return fit(
        stage,
        config,
        folder,
        processes=context.processes,
        layout=layout,
        reporter=context.reporter,
        stop=context.stop,
    )


def _self_test(context: ConversionContext) -> dict[str, float]:
    """How far a window over the whole text is from softmax: by rounding alone, if all is right."""
    analog = context.conversion.method.analog
    if analog.rule != "windowed" and not analog.has_window:
        return {}
    batch = next(context.validation.sequential_batches(1))
    inputs = {name: x.to(context.device) for name, x in batch.items() if name != "labels"}
    return {"largest_difference": difference_with_full_window(context.model, inputs)}


def _before_adaptation(context: ConversionContext) -> dict[str, Any]:
    """The model before stage two: how well it predicts, and how far its layers are from softmax."""
    batches = context.comparison_batches()
    found = compare_with_softmax(
        context.model, context.validation.sequential_batches(4), {LINEAR: Student()}
    )
    return {LINEAR: found[LINEAR].row(), **distances(context.model, batches)}


def _tell_if_worse(context: ConversionContext, distance: str) -> None:
    before, after = (context.read(name)[distance] for name in ("convert", "transfer"))
    if after > before:
        context.reporter.note(
            f"The transfer made the layers worse: their {distance} was {before:.4g}, is"
            f" {after:.4g}. Try a lower learning rate or more steps."
        )


def _batches_on_device(context: ConversionContext) -> list[dict[str, Tensor]]:
    return [
        {name: x.to(context.device) for name, x in batch.items()}
        for batch in context.comparison_batches()
    ]


def _original_teacher(context: ConversionContext) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The model as it was, loaded a second time where all its weights have changed."""
    original = context.load_original().eval()
    return torch.no_grad()(lambda inputs: next_logits(original, inputs))


def _has_adapters(context: ConversionContext) -> bool:
    conversion = context.conversion
    return conversion.method.adapt is not None and not conversion.trains_all_weights
