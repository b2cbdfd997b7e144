"""Claims about language models: one is trained for each mixer and seed, and its loss measured in
several ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np

from fastweights.errors import NonFiniteError
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
from fastweights.lab.reproduce.measures import Measure, Measures
from fastweights.lab.reproduce.n_grams import NGrams
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.data.corpus import Text, build_tokenizer
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.tokenizers import BPE, ExistingTokenizer, vocabulary_size
from fastweights.training.data.tokens import TokenText
from fastweights.training.language.architectures import Architecture
from fastweights.training.language.language_model import Every, TrainConfig, train
from fastweights.training.language.perplexity import PositionLoss, nll_by_position
from fastweights.training.loop.checkpoint import no_progress_bars
from fastweights.training.loop.files import atomic_folder, read_json, write_json
from fastweights.training.loop.folder import keyed_folder
from fastweights.training.loop.optimizers import AdamW
from fastweights.training.loop.schedules import Cosine

Fields = Mapping[str, Any]
POSITION, FAR = "by position", "mean so far"
MARGIN = 0.05
"""Nats below n-grams from which on a model has learnt more than neighbours, and those above the
least possible loss up to which it has learnt all."""
LONGEST, COUNTED, PREDICTED = 3, 2_000_000, 32_768
"""Tokens of the longest n-gram, those of text that are counted at most, and those predicted."""


@dataclass(frozen=True)
class ArchitectureWithFields(Architecture):
    """An architecture with further fields of the configuration, besides mixers, layers and
    width."""

    fields: Fields = field(default_factory=dict)

    def config(self, vocabulary: int = 1, **special: Any) -> FastWeightsConfig:
        return super().config(vocabulary, **self.fields)


@dataclass(frozen=True)
class Language:
    """The tokens of a language, and how many different ones there are.

    n-grams are counted in `train`, whose slices are arrays; models are measured on those tokens of
    `validation` that are `learnt`; None for all.
    """

    train: TokenText
    validation: TokenText
    vocabulary: int
    learnt: np.ndarray | None = None


class LanguageTraining(ABC):
    """The settings by which every model of an experiment is trained; models differ in mixers and
    seed.

    A frozen value.

    Attributes:
        rate: Peak learning rate.
        length: Tokens per sequence.
    """

    rate: float
    length: int

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files in the user's data that it reads."""
        return ()

    @property
    def least_loss(self) -> float | None:
        """The nats per token that no model can be below; None if they are not known."""
        return None

    @abstractmethod
    def train_or_load(
        self, mixers: Sequence[Fields], seed: int, context: TrialContext
    ) -> tuple[FastWeightsForCausalLM, Language]:
        """Train the model unless it exists already, and return it and its language."""

    def at_best_rate(
        self, mixers: Sequence[Fields], tuning: Tuning, context: TrialContext
    ) -> LanguageTraining:
        """Return the same training at the rate at which models of the tuning's seeds have the
        lowest loss; it is kept with them."""
        if not tuning.rates:
            return self
        tuned = TunedModel(self, mixers, tuning)
        rate = best_rate(
            tuned, tuning.rates, lambda rate: self._loss_at(rate, mixers, tuning, context), context
        )
        return replace(cast(Any, self), rate=rate)

    def _loss_at(
        self, rate: float, mixers: Sequence[Fields], tuning: Tuning, context: TrialContext
    ) -> float:
        """The mean validation loss over the tuning's seeds."""
        training: LanguageTraining = replace(cast(Any, self), rate=rate)
        losses = []
        for seed in tuning.seeds:
            model, language = training.train_or_load(mixers, seed, context)
            tokens = np.asarray(language.validation[:PREDICTED])
            losses.append(nll_by_position(model, tokens, self.length + 1, batch=16).mean)
        return float(np.mean(losses))


def best_rate(
    tuned: Any, rates: Sequence[float], loss_at: Callable[[float], float], context: TrialContext
) -> float:
    """Return the learning rate of the lowest loss; the losses are kept under `tuned`, a value that
    decides them.

    Raises:
        ValueError: If training diverged at every rate.
    """
    folder = keyed_folder(context.shared / "tuning", tuned)
    if not (folder / "losses.json").exists():
        losses = {str(rate): _loss_unless_diverged(loss_at, rate) for rate in rates}
        folder.mkdir(exist_ok=True)
        write_json(folder / "losses.json", losses)
    losses = read_json(folder / "losses.json")
    if min(losses.values()) == inf:
        raise ValueError(
            f"training diverges at every rate of {', '.join(losses)}; try lower --rates"
        )
    return float(min(losses, key=losses.__getitem__))


def _loss_unless_diverged(loss_at: Callable[[float], float], rate: float) -> float:
    try:
        loss = loss_at(rate)
    except NonFiniteError:
        return inf
    return loss if isfinite(loss) else inf


@dataclass(frozen=True)
class Tuning:
    """How each model's learning rate is chosen.

    By models of `seeds` of which none is judged; without `rates` it is that of the training.
    """

    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (100, 101)


@dataclass(frozen=True)
class TunedModel:
    """Everything that decides a model's learning rate."""

    training: LanguageTraining
    mixers: Sequence[Fields]
    tuning: Tuning


@dataclass(frozen=True)
class Pretraining(LanguageTraining):
    """Settings of a training on text.

    Attributes:
        text: The text to train on.
        layers, width, fields: Blocks, hidden size and further fields of the configuration.
        rate, steps, warmup: Peak learning rate, updates, and those of the warm-up.
        batch, length: Sequences per update, and their tokens.
        bf16: Whether matrix products are in bfloat16.
        data: Files of the user's data folder to read in place of `text`.
    """

    text: Text
    layers: int
    width: int
    fields: Fields
    rate: float
    steps: int
    batch: int
    length: int
    warmup: int
    bf16: bool = False
    data: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return self.data

    def config(self, mixers: Sequence[Fields], seed: int, text: Text) -> TrainConfig:
        """Return the configuration of one training."""
        return TrainConfig(
            text=text,
            model=ArchitectureWithFields(tuple(mixers), self.layers, self.width, self.fields),
            optimizer=AdamW(lr=self.rate),
            schedule=Cosine(warmup=self.warmup),
            every=Every(
                log=self.steps, evaluation=self.steps, checkpoint=max(self.steps // 10, 100)
            ),
            steps=self.steps,
            batch=self.batch,
            length=self.length,
            bf16=self.bf16,
            seed=seed,
        )

    def train_or_load(
        self, mixers: Sequence[Fields], seed: int, context: TrialContext
    ) -> tuple[FastWeightsForCausalLM, Language]:
        folder = keyed_folder(context.shared / "models", PretrainedModel(self, mixers, seed))
        text = share_tokenizer(self._own(context), context)
        if not (folder / "model").exists():
            config = self.config(mixers, seed, text)
            train(config, folder, cpu=context.device.type == "cpu")
        stored = TextFolder(folder, text, self.length, lambda: build_tokenizer(text))
        corpus = stored.open(is_first=False)
        language = Language(corpus.train, corpus.validation, vocabulary_size(corpus.tokenizer))
        return load_model(folder / "model", context), language

    def _own(self, context: TrialContext) -> Text:
        """The text, from the user's data if it says so."""
        return (
            replace(self.text, sources=tuple(str(context.file(n)) for n in self.data))
            if self.data
            else self.text
        )


@dataclass(frozen=True)
class PretrainedModel:
    """Everything that decides a pretrained model, which claims share."""

    pretraining: LanguageTraining
    mixers: Sequence[Fields]
    seed: int


def load_model(folder: Path, context: TrialContext) -> FastWeightsForCausalLM:
    """Load a model for its measurement."""
    with no_progress_bars():
        model: Any = FastWeightsForCausalLM.from_pretrained(folder)
    return model.to(context.device).eval()


def share_tokenizer(text: Text, context: TrialContext) -> Text:
    """Return the text with a tokenizer that all models share."""
    folder = keyed_folder(context.shared / "tokenizers", text)
    if not folder.exists():
        with atomic_folder(folder) as new:
            build_tokenizer(text).save_pretrained(new)
    return replace(text, tokenization=ExistingTokenizer(str(folder)))


def _backbone(
    layers: int, width: int, rate: float, steps: int, batch: int, length: int, text: Text
) -> Pretraining:
    """MesaNet's (appendix D)."""
    fields = {"intermediate_size": 3 * width, "tie_word_embeddings": True, "logit_cap": 30.0}
    return Pretraining(text, layers, width, fields, rate, steps, batch, length, warmup=steps // 10)


def _on_books(pretraining: Pretraining) -> Pretraining:
    return replace(pretraining, bf16=True, data=("books",))


SMALL = _backbone(2, 64, 6e-3, 200, 8, 256, Text(("shakespeare",), tokenization=BPE(512)))
"""Seconds on a CPU, on the megabyte of text that is in the package."""
LEARNT = replace(SMALL, steps=1200, warmup=120)
"""A minute on a CPU: what it takes to leave n-grams behind."""
TUNED_TEXT = Tuning((3e-3, 6e-3, 1.2e-2))
"""Three rates for the models above."""
MEDIUM = _on_books(_backbone(4, 256, 3e-3, 600, 16, 512, Text(tokenization=BPE(4096))))
"""A quarter of a minute on a GPU, on the texts in the folder `books` of the user's data."""
LARGE = _on_books(_backbone(14, 768, 1.5e-3, 28_600, 256, 2048, Text(tokenization=BPE(50_257))))
"""MesaNet's 145 million parameters and 15 billion tokens, which the user brings."""


class TextProbe(ABC):
    """A measurement on a trained model, a frozen value."""

    @abstractmethod
    def measures(
        self, series: str, seed: int, model: FastWeightsForCausalLM, tokens: TokenText
    ) -> Iterator[Measure]:
        """Measure the model on the tokens and yield the numbers."""


@dataclass(frozen=True)
class Positions(TextProbe):
    """A probe of the loss on so many `tokens` of validation text in sequences of `length`: over all
    tokens, and by position in octaves."""

    tokens: int
    length: int

    def measures(
        self, series: str, seed: int, model: FastWeightsForCausalLM, tokens: TokenText
    ) -> Iterator[Measure]:
        loss = nll_by_position(model, tokens[: self.tokens], self.length, batch=16, chunk=None)
        yield Measure(series, loss.mean, seed=seed)
        yield from by_octave(series, loss, seed)


@dataclass(frozen=True)
class Extrapolation(TextProbe):
    """A probe of the mean loss up to each of several lengths, with the state carried along.

    It reads so many `tokens` of validation text in sequences as long as the last of the `lengths`,
    a `batch` of them at once.
    """

    tokens: int
    lengths: tuple[int, ...]
    batch: int = 4

    def measures(
        self, series: str, seed: int, model: FastWeightsForCausalLM, tokens: TokenText
    ) -> Iterator[Measure]:
        loss = nll_by_position(model, tokens[: self.tokens], self.lengths[-1] + 1, batch=self.batch)
        for length in self.lengths:
            yield Measure(series, float(loss.mean_so_far[length - 1]), length, FAR, seed)


def losses_of_n_grams(language: Language) -> dict[str, float]:
    """Return the nats per token of validation text that n-grams of the training text reach, by
    name."""
    counted, predicted = (
        np.asarray(text[:count]).tolist()
        for text, count in ((language.train, COUNTED), (language.validation, PREDICTED))
    )
    counts = NGrams(counted, LONGEST, language.vocabulary)
    learnt = np.ones(len(predicted), bool) if language.learnt is None else language.learnt
    places = np.flatnonzero(learnt[1 : len(predicted)]) + 1
    return {
        f"{order}-grams": counts.loss(predicted, order, places.tolist())
        for order in range(1, LONGEST + 1)
    }


def by_octave(series: str, loss: PositionLoss, seed: int) -> Iterator[Measure]:
    """Yield the nats per token from each power of two up to the next."""
    last = len(loss.nll)
    edges = np.array(sorted({*(2**n for n in range(int(np.log2(last)) + 1)), last + 1}))
    for edge, value in zip(edges, loss.mean_between(edges), strict=False):
        yield Measure(series, float(value), int(edge), POSITION, seed)


@dataclass(frozen=True)
class LanguageModelTrial(Trial):
    """A trial that trains one model from one seed, at the rate that `tuning` chooses, and probes it
    by every one of the `readings`."""

    series: str
    mixers: tuple[Fields, ...]
    seed: int
    pretraining: LanguageTraining
    readings: tuple[TextProbe, ...]
    tuning: Tuning = Tuning()

    @property
    def name(self) -> str:
        return f"{self.series}, seed {self.seed}"

    @property
    def files(self) -> tuple[str, ...]:
        return self.pretraining.files

    def run(self, context: TrialContext) -> list[Measure]:
        tuned = self.pretraining.at_best_rate(self.mixers, self.tuning, context)
        model, language = tuned.train_or_load(self.mixers, self.seed, context)
        found = (
            reading.measures(self.series, self.seed, model, language.validation)
            for reading in self.readings
        )
        return [measure for some in found for measure in some]


@dataclass(frozen=True)
class LanguageModels(Experiment):
    """An experiment that trains several models, each from several seeds, and probes them.

    Attributes:
        models: The models' mixers by series.
        pretraining, tuning: How they are trained, and how each one's learning rate is chosen.
        readings: The probes.
        seeds: The seeds.
        reference: A series; differences to it by position are added.
        fields: Further fields of the configuration of some series.

    Raises:
        ValueError: If a seed both chooses and is judged.
    """

    models: Mapping[str, tuple[Fields, ...]]
    pretraining: LanguageTraining
    readings: tuple[TextProbe, ...]
    seeds: tuple[int, ...] = FIVE
    reference: str | None = None
    tuning: Tuning = Tuning()
    fields: Mapping[str, Fields] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_apart(self.tuning.seeds if self.tuning.rates else (), self.seeds)

    def trials(self) -> Sequence[Trial]:
        return [
            LanguageModelTrial(
                series, mixers, seed, self._pretraining(series), self.readings, self.tuning
            )
            for seed in self.seeds
            for series, mixers in self.models.items()
        ]

    def _pretraining(self, series: str) -> LanguageTraining:
        training: Any = self.pretraining
        own = self.fields.get(series)
        return replace(training, fields={**training.fields, **own}) if own else training

    @property
    def rates(self) -> int:
        return max(1, len(self.tuning.rates))

    @property
    def scale(self) -> Scale:
        least = self.pretraining.least_loss
        return Scale(MARGIN, None if least is None else least + MARGIN, ascending=False)

    def floors(self, context: TrialContext) -> list[Measure]:
        series, mixers = next(iter(self.models.items()))
        tuned = self._pretraining(series).at_best_rate(mixers, self.tuning, context)
        _, language = tuned.train_or_load(mixers, self.seeds[0], context)
        return [
            Measure(name, nats, quantity=FLOOR)
            for name, nats in losses_of_n_grams(language).items()
        ]

    def with_settings(self, other: OtherSettings) -> LanguageModels:
        training: Any = self.pretraining
        return replace(
            self,
            tuning=replace(self.tuning, rates=other.rates or self.tuning.rates),
            seeds=other.seeds or self.seeds,
            pretraining=replace(training, steps=other.steps or training.steps),
        )

    def summary(self, measures: Measures) -> Measures:
        if self.reference is None:
            return measures
        rows = measures.of(POSITION)
        base = {(row.x, row.seed): row.value for row in rows if row.series == self.reference}
        quantity = f"difference to {self.reference}"
        differences = (
            Measure(row.series, row.value - base[row.x, row.seed], row.x, quantity, row.seed)
            for row in rows
            if row.series != self.reference
        )
        return Measures([*measures, *differences])
