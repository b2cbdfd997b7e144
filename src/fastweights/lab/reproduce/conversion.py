"""Claims about linearizing: a softmax model converted by several methods, each from several
seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.lab.reproduce.claim import FIVE, Experiment, Trial, TrialContext
from fastweights.lab.reproduce.measures import Measure
from fastweights.lab.reproduce.text import share_tokenizer
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.training.data.corpus import Text
from fastweights.training.data.documents import Data
from fastweights.training.language.architectures import HuggingFace
from fastweights.training.language.language_model import Every, TrainConfig, train
from fastweights.training.loop.files import read_json
from fastweights.training.loop.folder import keyed_folder
from fastweights.training.loop.optimizers import AdamW
from fastweights.training.loop.schedules import Cosine

AFTER, BEFORE = "PPL@2", "PPL@0"
APART, ERROR = "KL of weights", "error of outputs"


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

    It measures perplexities after the conversion (PPL@0) and after stage two (PPL@2), on at most
    `held_out` tokens in sequences of `length`, and how far the layers are from softmax before stage
    two. Its report, with attention maps, stays in the shared folder.
    """

    series: str
    recipe: LinearizationRecipe
    seed: int
    teacher: TrainedTeacher | ProvidedTeacher
    length: int
    held_out: int

    @property
    def name(self) -> str:
        return f"{self.series}, seed {self.seed}"

    @property
    def files(self) -> tuple[str, ...]:
        return self.teacher.files

    def run(self, context: TrialContext) -> list[Measure]:
        data = Data(
            self.teacher.sources(context),
            length=self.length,
            boundaries=False,
            held_out=self.held_out,
        )
        conversion = Conversion(
            str(self.teacher.prepare_model(context)), data, self.recipe, seed=self.seed
        )
        out = keyed_folder(context.shared / "conversions", self)
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
        return [
            Measure(self.series, value, quantity=name, seed=self.seed)
            for name, value in found.items()
        ]


@dataclass(frozen=True)
class Conversions(Experiment):
    """An experiment that converts a softmax model by every recipe, from every seed, each as a
    `ConversionTrial`."""

    recipes: Mapping[str, LinearizationRecipe]
    teacher: TrainedTeacher | ProvidedTeacher
    length: int
    held_out: int
    seeds: tuple[int, ...] = FIVE

    @property
    def updates(self) -> Mapping[str, int]:
        return {
            name: sum(stage.fit.steps for stage in recipe.stages)
            for name, recipe in self.recipes.items()
        }

    def trials(self) -> Sequence[Trial]:
        return [
            ConversionTrial(series, recipe, seed, self.teacher, self.length, self.held_out)
            for seed in self.seeds
            for series, recipe in self.recipes.items()
        ]


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
            optimizer=AdamW(lr=self.rate, betas=(0.9, 0.999), weight_decay=0.0),
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
