"""The steps of a conversion's run, in order: the files that each writes, and the model that it
leaves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastweights.linearize.distill.adapt import load_adapters
from fastweights.linearize.distill.card import model_card
from fastweights.linearize.distill.comparison import (
    LINEAR,
    SOFTMAX,
    difference_with_full_window,
)
from fastweights.linearize.distill.context import ConversionContext
from fastweights.linearize.distill.evaluation import evaluate_conversion
from fastweights.linearize.distill.ranking import Ranking
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.report import write_report
from fastweights.linearize.distill.selection import trained_losses
from fastweights.linearize.distill.training import AdaptVerb, layer_verb, measure_layers
from fastweights.linearize.distill.verb import Verb
from fastweights.runs.checkpoint import no_progress_bars, save_model
from fastweights.runs.errors import Stopped
from fastweights.runs.files import atomic_folder, read_json
from fastweights.train.adapters import merge_adapters


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
            context.write("convert", {**_self_test(context), **measure_layers(context)})
        return True


class RankLayersVerb(Verb):
    """Rank the layers, or take the ranking that is given, and make the first of them softmax again,
    as many as the budget allows."""

    name, result = "rank-layers", "ranking.json"
    numbers = ("damage", "softmax")

    def run_together(self, context: ConversionContext) -> bool:
        """Train candidates in all processes, if the recipe does; then rank in the first one."""
        if not self.is_done(context.out) and context.trains_candidates:
            try:
                ranking = context.rank(trained_losses(context))
            except Stopped:
                return False
            with context.processes.first_then_others():
                self._keep(context, ranking)
        return super().run_together(context)

    def run(self, context: ConversionContext) -> bool:
        conversion, linear = context.conversion, context.linear_layers()
        if not self.is_done(context.out):
            self._keep(context, conversion.ranking or context.rank(context.losses()))
        softmax = context.read("ranking")["softmax"]
        if softmax:
            layers = [layer for layer in linear if layer not in softmax]
            context.model = context.convert_again(layers, conversion.bits)
        return True

    def _keep(self, context: ConversionContext, ranking: Ranking) -> None:
        """Write down the ranking, and which layers stay softmax by it."""
        if not self.is_done(context.out):
            linear = context.linear_layers()
            order = [layer for layer in ranking.order if layer in linear]
            kept = context.conversion.budget.choose(order, context.plan.caches)
            context.write("ranking", {**ranking.record(), "softmax": kept})


class EvaluateVerb(Verb):
    """Judge the finished model beside its softmax, and with each side of its attention alone."""

    name, result = "eval", "evaluation.json"
    numbers = (SOFTMAX, LINEAR)

    def is_done(self, out: Path) -> bool:
        """Whether its result is there, and not of a version that had no share yet."""
        return super().is_done(out) and "share" in read_json(out / self.result)

    def run(self, context: ConversionContext) -> bool:
        if self.is_done(context.out):
            return True
        judged, found = evaluate_conversion(context)
        context.out.joinpath("positions").mkdir(exist_ok=True)
        for name, compared in found.items():
            compared.loss.save(context.out / "positions" / f"{name}.json")
        context.write("evaluation", judged)
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
        if context.conversion.recipe.adapters:
            with atomic_folder(context.out / "adapter") as folder:
                context.model.save_pretrained(folder)
        context.model = self._merge(context)
        with no_progress_bars(), atomic_folder(context.out / "model") as folder:
            save_model(context.model, context.tokenizer, folder)
            card = model_card(context.out, context.model.config.model_type, context.linear_layers())
            (folder / "README.md").write_text(card, encoding="utf-8")
        return True

    def _merge(self, context: ConversionContext) -> Any:
        """The model with its adapters merged, in weights that are not quantised."""
        if context.conversion.bits is None:
            return merge_adapters(context.model)
        layers = context.linear_layers()
        if not context.conversion.recipe.adapters:
            return context.convert_again(layers, None)
        original = context.linearize_original(layers, None)
        return merge_adapters(load_adapters(original, context.out / "adapter"))


BY_LAYER, WHOLE = "transfer", "finetune"
"""What ends with the last stage that trains layer by layer, and with the last stage of all."""


def verbs_of(recipe: LinearizationRecipe) -> tuple[Verb, ...]:
    """Return the steps of a recipe's run in their order."""
    return (
        PlanVerb(),
        ConvertVerb(),
        *map(layer_verb, recipe.by_layer),
        RankLayersVerb(),
        *map(AdaptVerb, recipe.whole),
        EvaluateVerb(),
        ReportVerb(),
        ExportVerb(),
    )


def verbs_until(recipe: LinearizationRecipe, name: str) -> tuple[Verb, ...]:
    """Return the steps of a recipe's run up to one of them.

    Args:
        recipe: The recipe.
        name: Name of the last step, or `BY_LAYER` or `WHOLE`.

    Raises:
        ValueError: If there is no such step.
    """
    verbs = verbs_of(recipe)
    first = verbs.index(next(verb for verb in verbs if isinstance(verb, RankLayersVerb)))
    phases = {BY_LAYER: first, WHOLE: first + 1 + len(recipe.whole)}
    ends = {verb.name: place for place, verb in enumerate(verbs, 1)} | phases
    if name not in ends:
        raise ValueError(f"there is no step {name!r} in this run; there are {', '.join(ends)}")
    return verbs[: ends[name]]


def _self_test(context: ConversionContext) -> dict[str, float]:
    """How far a window over the whole text is from softmax: by rounding alone, if all is right."""
    analog = context.conversion.recipe.analog
    if analog.rule != "windowed" and not analog.has_window:
        return {}
    batch = next(context.validation.sequential_batches(1))
    inputs = {name: x.to(context.device) for name, x in batch.items() if name != "labels"}
    return {"largest_difference": difference_with_full_window(context.model, inputs)}
