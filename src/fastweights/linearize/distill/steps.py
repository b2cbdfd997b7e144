"""The steps of a conversion's run, in order: the files that each writes, and the model that it
leaves."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fastweights.errors import Stopped
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.distill.adapt import load_adapters
from fastweights.linearize.distill.fit import read_tensors
from fastweights.linearize.distill.plan import ConversionPlan, cache_memory, plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.selection import (
    rank_now,
    rank_trained,
    trains_candidates,
)
from fastweights.linearize.distill.step import ConversionStep
from fastweights.linearize.distill.student import LANDMARKS, StudentModel
from fastweights.linearize.distill.training import measure_layers, step_of
from fastweights.linearize.evaluate.card import model_card
from fastweights.linearize.evaluate.comparison import LINEAR, SOFTMAX, difference_with_full_window
from fastweights.linearize.evaluate.evaluation import evaluate_conversion
from fastweights.linearize.evaluate.logits import inputs_of, unwrap_adapters
from fastweights.linearize.evaluate.ranking import Ranking
from fastweights.linearize.evaluate.report import write_report
from fastweights.training.language.adapters import merge_adapters
from fastweights.training.loop.checkpoint import no_progress_bars, save_model
from fastweights.training.loop.files import atomic_folder


class PlanStep(ConversionStep):
    """Compute the numbers of the conversion before anything is done."""

    name, result = "plan", "plan.json"
    numbers = ("model_type", "parameters", "converted", "left", "break_even")

    def run(self, student: StudentModel) -> StudentModel:
        run = student.run
        if not self.is_done(run.out):
            run.write("plan", {**asdict(run.plan), "break_even": run.plan.break_even})
        return student


class ConvertStep(ConversionStep):
    """Convert the model, test the conversion, and measure the loss before training."""

    name, result = "convert", "convert.json"
    numbers = (LINEAR, "error")

    def run(self, student: StudentModel) -> StudentModel:
        if not self.is_done(student.run.out):
            first = next(iter(student.run.conversion.recipe.stages), None)
            student.run.write("convert", {**_self_test(student), **measure_layers(student, first)})
        return student


class RankLayersStep(ConversionStep):
    """Rank the layers, or take the ranking that is given, and make the first of them softmax again,
    as many as the budget allows.

    Args:
        is_last: Whether the run ends with the ranking, which is made then even if all layers are
            to be linear.
    """

    name, result = "rank-layers", "ranking.json"
    numbers = ("damage", "softmax")

    def __init__(self, is_last: bool = False) -> None:
        self.is_last = is_last

    def run_together(self, student: StudentModel) -> StudentModel | None:
        """Train candidates in all processes, if the recipe does; then rank in the first one."""
        if not self.is_done(student.run.out) and trains_candidates(student):
            try:
                ranking = rank_trained(student)
            except Stopped:
                return None
            with student.run.processes.first_then_others():
                self._keep(student, ranking)
        return super().run_together(student)

    def run(self, student: StudentModel) -> StudentModel:
        run, linear = student.run, student.linear_layers()
        if not self.is_done(run.out):
            if not self.is_last and not run.conversion.budget.choose(linear, run.plan.caches):
                return student
            self._keep(student, run.conversion.ranking or rank_now(student))
        softmax = run.read("ranking")["softmax"]
        if not softmax:
            return student
        layers = [layer for layer in linear if layer not in softmax]
        return student.with_model(student.convert_again(layers, run.conversion.bits))

    def _keep(self, student: StudentModel, ranking: Ranking) -> None:
        """Write down the ranking, and which layers stay softmax by it."""
        run, linear = student.run, student.linear_layers()
        if not self.is_done(run.out):
            order = [layer for layer in ranking.order if layer in linear]
            kept = run.conversion.budget.choose(order, run.plan.caches)
            run.write("ranking", {**ranking.record(), "softmax": kept})


class EvaluateStep(ConversionStep):
    """Judge the finished model beside its softmax, and with each side of its attention alone."""

    name, result = "eval", "evaluation.json"
    numbers = (SOFTMAX, LINEAR)

    def run(self, student: StudentModel) -> StudentModel:
        run, text = student.run, student.text
        if self.is_done(run.out):
            return student
        original = None if student.has_own_teacher else student.loader.teacher()()
        judged, found = evaluate_conversion(
            student.model,
            original,
            text.tokenizer,
            text.validation,
            run.conversion.data.length,
            max(len(text.validation.text), sum(stage.tokens for stage in run.plan.stages)),
            {
                # as many tokens' keys and values as the state has bytes for
                cache.layer: max(2, cache.state // cache.token)
                for cache in _plan_of(student).caches
                if cache.state
            },
            run.follow,
            run.known,
        )
        run.out.joinpath("positions").mkdir(exist_ok=True)
        for name, compared in found.items():
            compared.loss_beside(found[SOFTMAX]).save(run.out / "positions" / f"{name}.json")
        run.write("evaluation", {**judged, **_memory(student)})
        return student


class ReportStep(ConversionStep):
    """Write all numbers and pictures as one page."""

    name, result = "report", "report/report.html"

    def run(self, student: StudentModel) -> StudentModel:
        out = student.run.out
        if not self.is_done(out):
            batch = student.text.validation.sequential_batches(1)[0]
            with atomic_folder(out / "report") as folder:
                write_report(student.model, batch, out, folder, _placed(out), student.run.follow)
        return student


class ExportStep(ConversionStep):
    """Write the whole model with its adapters merged.

    It is the last step, since merged adapters cannot be switched off any more.
    """

    name, result = "export", "model"

    def run(self, student: StudentModel) -> StudentModel:
        out, layers = student.run.out, student.linear_layers()
        if self.is_done(out):
            return student
        if student.run.conversion.recipe.adapters:
            with atomic_folder(out / "adapter") as folder:
                student.model.save_pretrained(folder)
        model = self._merge(student)
        with no_progress_bars(), atomic_folder(out / "model") as folder:
            save_model(model, student.text.tokenizer, folder)
            card = model_card(out, model.config.model_type, layers)
            (folder / "README.md").write_text(card, encoding="utf-8")
        return student.with_model(model)

    def _merge(self, student: StudentModel) -> Any:
        """The model with its adapters merged, in weights that are not quantised."""
        conversion = student.run.conversion
        if conversion.bits is None:
            return merge_adapters(student.model)
        layers = student.linear_layers()
        if not conversion.recipe.adapters:
            return student.convert_again(layers, None)
        original = student.loader.linearize(layers, None)
        return merge_adapters(load_adapters(original, student.run.out / "adapter"))


BY_LAYER, WHOLE = "transfer", "finetune"
"""What ends with the last stage that trains layer by layer, and with the last stage of all."""


def steps_of(recipe: LinearizationRecipe) -> tuple[ConversionStep, ...]:
    """Return the steps of a recipe's run in their order."""
    return (
        PlanStep(),
        ConvertStep(),
        *map(step_of, recipe.by_layer),
        RankLayersStep(),
        *map(step_of, recipe.whole),
        EvaluateStep(),
        ReportStep(),
        ExportStep(),
    )


def steps_until(recipe: LinearizationRecipe, name: str) -> tuple[ConversionStep, ...]:
    """Return the steps of a recipe's run up to one of them.

    Args:
        recipe: The recipe.
        name: Name of the last step, or `BY_LAYER` or `WHOLE`.

    Raises:
        ValueError: If there is no such step.
    """
    steps = steps_of(recipe)
    first = steps.index(next(step for step in steps if isinstance(step, RankLayersStep)))
    phases = {BY_LAYER: first, WHOLE: first + 1 + len(recipe.whole)}
    ends = {step.name: place for place, step in enumerate(steps, 1)} | phases
    if name not in ends:
        raise ValueError(f"there is no step {name!r} in this run; there are {', '.join(ends)}")
    if name == RankLayersStep.name:
        return (*steps[:first], RankLayersStep(is_last=True))
    return steps[: ends[name]]


def _placed(out: Path) -> dict[str, Tensor]:
    """The landmarks as they were placed, if the recipe has any."""
    path = out / LANDMARKS
    return read_tensors(path) if path.exists() else {}


def _memory(student: StudentModel) -> dict[str, Any]:
    """What caches take beside those of softmax, and from how many tokens on less."""
    conversion, planned = student.run.conversion, _plan_of(student)
    sizes = cache_memory(conversion.model, planned, conversion.recipe.analog.window)
    return {"memory": [asdict(size) for size in sizes], "break_even": planned.break_even}


def _plan_of(student: StudentModel) -> ConversionPlan:
    """The numbers of the model as it is: some layers may be softmax, and a budget is divided."""
    conversion, layers = student.run.conversion, student.linear_layers()
    recipe = conversion.recipe
    if conversion.state_budget is None and len(layers) == len(student.run.plan.converted):
        return student.run.plan
    if conversion.state_budget is not None:
        analog = unwrap_adapters(student.model).config.linearize["analog"]
        recipe = replace(recipe, analog=LinearAttentionConfig.from_stored(analog))
    return plan(conversion.model, recipe, layers=layers, dtype=student.model.dtype)


def _self_test(student: StudentModel) -> dict[str, float]:
    """How far a window over the whole text is from softmax: by rounding alone, if all is right."""
    analog = student.run.conversion.recipe.analog
    if analog.rule != "windowed" and not analog.has_window:
        return {}
    batch = student.text.validation.sequential_batches(1)[0]
    inputs = inputs_of(batch, student.run.device)
    return {"largest_difference": difference_with_full_window(student.model, inputs)}
