"""Claims about linearizing: a softmax model converted by several methods, each from several
seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from fastweights.lab.reproduce.claim import (
    FIVE,
    FLOOR,
    Experiment,
    OtherSettings,
    Scale,
    Trial,
    TrialContext,
    require_apart,
)
from fastweights.lab.reproduce.measures import Measure
from fastweights.lab.reproduce.text import (
    Language,
    Tuning,
    best_rate,
    losses_of_n_grams,
    share_tokenizer,
)
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.training.data.corpus import Text
from fastweights.training.data.documents import Data
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.tokenizers import vocabulary_size
from fastweights.training.language.architectures import HuggingFace
from fastweights.training.language.language_model import Every, TrainConfig, train
from fastweights.training.loop.files import read_json
from fastweights.training.loop.folder import keyed_folder
from fastweights.training.loop.optimizers import AdamW
from fastweights.training.loop.schedules import Cosine

AFTER, BEFORE = "PPL@2", "PPL@0"
APART, ERROR = "KL of weights", "error of outputs"
TRANSFER_RATIO = 100
"""The rate of attention transfer over that of adaptation: 1e-2 and 1e-4 in the paper."""


@dataclass(frozen=True)
class TrainedTeacher:
    """A small softmax model of transformers, such as "llama", that is trained here on its text,
    unless it exists already: by so many `steps` of `batch` sequences of `length` tokens."""

    kind: str
    fields: Mapping[str, Any]
    text: Text
    rate: float
    steps: int
    batch: int
    length: int

    @property
    def files(self) -> tuple[str, ...]:
        """None of the user's."""
        return ()

    def prepare_model(self, context: TrialContext) -> Path:
        """Train the model unless it exists already, and return its folder."""
        out = keyed_folder(context.shared / "models", self)
        if not (out / "model").exists():
            train(self._config(context), out, cpu=context.device.type == "cpu")
        return out / "model"

    def _config(self, context: TrialContext) -> TrainConfig:
        return TrainConfig(
            text=share_tokenizer(self.text, context),
            model=HuggingFace(self.kind, self.fields),
            optimizer=AdamW(lr=self.rate),
            schedule=Cosine(warmup=self.steps // 10),
            every=Every(log=self.steps, evaluation=self.steps, checkpoint=100),
            steps=self.steps,
            batch=self.batch,
            length=self.length,
        )

    def sources(self, context: TrialContext) -> tuple[str, ...]:
        """Return the sources of its text."""
        return self.text.sources


@dataclass(frozen=True)
class ProvidedTeacher:
    """A softmax model and a text from the user's data, such as Llama 3 8B and Alpaca, by the names
    of the model's folder and the text file."""

    model: str
    text: str

    @property
    def files(self) -> tuple[str, ...]:
        """The names of both."""
        return self.model, self.text

    def prepare_model(self, context: TrialContext) -> Path:
        """Return the model's folder."""
        return context.file(self.model)

    def sources(self, context: TrialContext) -> tuple[str, ...]:
        """Return the sources of its text."""
        return (str(context.file(self.text)),)


@dataclass(frozen=True)
class ConversionTrial(Trial):
    """A trial of one conversion of a softmax model; `seed` decides the order of the text.

    It measures perplexities after the conversion (PPL@0) and after stage two (PPL@2), of responses
    where the text has any, on at most `held_out` tokens in sequences of `length`, and how far the
    layers are from softmax before stage two. Its report, with attention maps, stays in the shared
    folder. If the `tuning` has rates, the adaptation has that of them with the lowest PPL@2, and
    the transfer `TRANSFER_RATIO` times it.
    """

    series: str
    recipe: LinearizationRecipe
    seed: int
    teacher: TrainedTeacher | ProvidedTeacher
    length: int
    held_out: int
    tuning: Tuning = Tuning()

    @property
    def name(self) -> str:
        return f"{self.series}, seed {self.seed}"

    @property
    def files(self) -> tuple[str, ...]:
        return self.teacher.files

    def run(self, context: TrialContext) -> list[Measure]:
        found = self._at_best_rate(context).convert(context)
        return [
            Measure(self.series, value, quantity=name, seed=self.seed)
            for name, value in found.items()
        ]

    def convert(self, context: TrialContext) -> dict[str, float]:
        """Convert the model by the recipe's own rates, and return what was measured."""
        out = self._folder(context)
        model = str(self.teacher.prepare_model(context))
        conversion = Conversion(model, self._data(context), self.recipe, seed=self.seed)
        run_conversion(conversion, out, until="report", device=context.device)
        by_layer = [stage.name for stage in self.recipe.by_layer]
        first = read_json(out / f"{by_layer[-1] if by_layer else 'convert'}.json")
        found = {
            AFTER: read_json(out / "evaluation.json")["linear"]["perplexity"],
            BEFORE: first["linear"]["perplexity"],
            ERROR: first["error"],
        }
        if "divergence" in first:  # of weights, which SUPRA's norm does not leave
            found[APART] = first["divergence"]
        return found

    def language(self, context: TrialContext) -> Language:
        """Return the text that its run has read."""
        tuned = self._at_best_rate(context)
        folder = TextFolder(
            tuned._folder(context), tuned._data(context), self.length, PreTrainedTokenizerFast
        )
        corpus = folder.open(is_first=False)
        _, _, responses = corpus.validation.read(0, len(corpus.validation))
        size = vocabulary_size(corpus.tokenizer)
        return Language(corpus.train, corpus.validation, size, responses)

    def _folder(self, context: TrialContext) -> Path:
        return keyed_folder(context.shared / "conversions", self)

    def _data(self, context: TrialContext) -> Data:
        sources = self.teacher.sources(context)
        return Data(
            sources, length=self.length, responses=True, boundaries=False, held_out=self.held_out
        )

    def _at_best_rate(self, context: TrialContext) -> ConversionTrial:
        """The trial at the rates of its own that are the best for the seeds of the tuning."""
        if not self.tuning.rates:
            return self
        tuned = replace(self, seed=self.tuning.seeds[0])
        rate = best_rate(
            tuned, self.tuning.rates, lambda rate: tuned._loss_at(rate, context), context
        )
        return self._at_rate(rate)

    def _at_rate(self, rate: float) -> ConversionTrial:
        return replace(self, recipe=with_rate(self.recipe, rate), tuning=Tuning())

    def _loss_at(self, rate: float, context: TrialContext) -> float:
        """The mean loss in nats over the tuning's seeds."""
        trials = (replace(self._at_rate(rate), seed=seed) for seed in self.tuning.seeds)
        return fmean(log(trial.convert(context)[AFTER]) for trial in trials)


@dataclass(frozen=True)
class Conversions(Experiment):
    """An experiment that converts a softmax model by every recipe, from every seed, each as a
    `ConversionTrial`.

    Raises:
        ValueError: If a seed both chooses and is judged.
    """

    recipes: Mapping[str, LinearizationRecipe]
    teacher: TrainedTeacher | ProvidedTeacher
    length: int
    held_out: int
    seeds: tuple[int, ...] = FIVE
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        require_apart(self.tuning.seeds if self.tuning.rates else (), self.seeds)

    @property
    def rates(self) -> int | None:
        return len(self.tuning.rates) or None

    @property
    def updates(self) -> Mapping[str, int]:
        return {
            name: sum(stage.fit.steps for stage in recipe.stages)
            for name, recipe in self.recipes.items()
        }

    def trials(self) -> Sequence[ConversionTrial]:
        return [
            ConversionTrial(
                series, recipe, seed, self.teacher, self.length, self.held_out, self.tuning
            )
            for seed in self.seeds
            for series, recipe in self.recipes.items()
        ]

    @property
    def scale(self) -> Scale:
        return Scale(0.0, ascending=False, quantity=AFTER)

    def floors(self, context: TrialContext) -> list[Measure]:
        """The perplexities of n-grams of the text."""
        losses = losses_of_n_grams(self.trials()[0].language(context))
        return [Measure(name, exp(nats), quantity=FLOOR) for name, nats in losses.items()]

    def with_settings(self, other: OtherSettings) -> Conversions:
        if other.steps:
            raise ValueError(
                f"steps = {other.steps}: a conversion has stages with updates of their own; leave"
                " it out"
            )
        tuning = replace(self.tuning, rates=other.rates or self.tuning.rates)
        return replace(self, tuning=tuning, seeds=other.seeds or self.seeds)


class Updates(NamedTuple):
    """The number of updates of a training stage, and its initial learning rate."""

    steps: int
    rate: float

    def of(self, fit: Fit, batch: int) -> Fit:
        """Return `fit` with these updates, on `batch` sequences each."""
        return replace(
            fit,
            steps=self.steps,
            batch=batch,
            optimizer=_adam(self.rate),
            every=Every(log=self.steps, evaluation=self.steps, checkpoint=100),
        )


def with_updates(
    recipe: LinearizationRecipe, transfer: Updates, adapt: Updates, batch: int
) -> LinearizationRecipe:
    """Return `recipe` with the number of updates of each of its stages replaced.

    One without attention transfer adapts by the updates of both, so that all have equal effort.
    """
    whole = adapt if recipe.by_layer else Updates(transfer.steps + adapt.steps, adapt.rate)
    return recipe.with_stages(
        stage.with_fit((transfer if stage.by_layer else whole).of(stage.fit, batch))
        for stage in recipe.stages
    )


def with_rate(recipe: LinearizationRecipe, rate: float) -> LinearizationRecipe:
    """Return `recipe` with adaptation at this learning rate, and transfer at `TRANSFER_RATIO` times
    it."""
    return recipe.with_stages(
        stage.with_fit(_at(stage.fit, rate * TRANSFER_RATIO if stage.by_layer else rate))
        for stage in recipe.stages
    )


def _at(fit: Fit, rate: float) -> Fit:
    return replace(fit, optimizer=_adam(rate))


def _adam(rate: float) -> AdamW:
    return AdamW(lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
