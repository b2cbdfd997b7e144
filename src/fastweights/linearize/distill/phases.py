"""How long a run of a conversion takes, phase by phase, by the speed of the model's own layers on
this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastweights.linearize.convert.rotary import positions_of
from fastweights.linearize.distill.plan import ConversionPlan, StagePlan
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.run import COMPARISON_SEQUENCES, sequences_beside
from fastweights.linearize.distill.student import long_texts, tokens_for_landmarks
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.linearize.evaluate.criteria import Criterion, choices_of
from fastweights.linearize.evaluate.evaluation import sequences_of_further
from fastweights.linearize.evaluate.recall import PASSAGE, choose_distances, sequences_at

TIMED_LAYERS = 2
"""Of the model that is timed, whose weights are drawn."""
LINEAR, MEASURED, PLACING, DIVIDING = 1.25, 1.35, 0.4, 0.7
"""A layer's forward with linear attention, one of softmax whose distance from it is measured, and
what placing landmarks and measuring windows add to reading their texts, as multiples of the softmax
layer's forward."""
TRANSFER, ADAPTATION = 2.3, 3.7
"""A token of a step: as a multiple of the layers' forward, and of the model's without a teacher's.
"""
COMPARING = 1.0
"""A token's logits compared with softmax's, as a multiple of the product that gives them."""
TESTED, ABLATED, RECALLED = 4.5, 3, 4
"""What a sequence is read for the test of a conversion; modes of the model beside the two that are
known at the end; and modes that recall reads."""
SAMPLED, PAGE = 7000, 5.0
"""What samples and their timing take, as tokens that are read at once, and seconds for pictures."""


@dataclass(frozen=True)
class PhasePlan:
    """A phase of a run: how many tokens it reads, and how long that takes."""

    name: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ForwardSpeed:
    """Seconds per token of a model's forward: of all layers, and of the logits."""

    layers: float
    logits: float

    @classmethod
    @torch.no_grad()
    def measure(cls, source: str, length: int) -> Self:
        """Time a few layers of the model's kind, with drawn weights, in float32."""
        config: Any = deepcopy(AutoConfig.from_pretrained(source).get_text_config())
        layers, config.num_hidden_layers = config.num_hidden_layers, TIMED_LAYERS
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        ids = torch.zeros(1, length, dtype=torch.long)
        body = _least_seconds(lambda: model.base_model(input_ids=ids, use_cache=False)) / length
        hidden = torch.zeros(1, length, config.hidden_size)
        logits = _least_seconds(lambda: model.get_output_embeddings()(hidden)) / length
        return cls(body * layers / TIMED_LAYERS, logits)

    @property
    def forward(self) -> float:
        """Of both."""
        return self.layers + self.logits


def _least_seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    call()
    found = list[float]()
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def plan_run(
    source: str,
    recipe: LinearizationRecipe,
    planned: ConversionPlan,
    length: int,
    validation: int,
    criterion: Criterion | None = None,
    state_budget: int | None = None,
) -> tuple[PhasePlan, ...]:
    """Estimate every phase of a run.

    Args:
        source: A model, a folder or a name on the Hugging Face hub; only the configuration is read.
        recipe: What replaces softmax attention, and how it is trained.
        planned: The numbers of the conversion.
        length: Tokens per sequence.
        validation: Tokens of the validation text.
        criterion: By what layers are ranked; None where none is kept, or they were ranked before.
        state_budget: Bytes of the states; None for those of the recipe's windows.
    """
    reach = positions_of(AutoConfig.from_pretrained(source).get_text_config())
    speed, start = ForwardSpeed.measure(source, length), time.process_time()
    phases = _Phases(speed, recipe, validation, length, reach, state_budget)
    stages = [
        (config, list(phases.stage(config, of)))
        for config, of in zip(recipe.stages, planned.stages, strict=True)
    ]
    return (
        PhasePlan("start", 0, start),  # what importing took this process, and takes the run
        *phases.placing(planned),
        phases.conversion(),
        *(phase for config, own in stages if config not in recipe.whole for phase in own),
        *([] if criterion is None else phases.ranking(criterion, planned)),
        *(phase for config, own in stages if config in recipe.whole for phase in own),
        phases.evaluation(planned),
    )


@dataclass(frozen=True)
class _Phases:
    speed: ForwardSpeed
    recipe: LinearizationRecipe
    validation: int
    length: int
    reach: int | None
    state_budget: int | None

    def placing(self, planned: ConversionPlan) -> Iterator[PhasePlan]:
        if self.recipe.analog.features == "landmarks":
            width = self.recipe.analog.feature_dim or planned.converted[0].head_dim // 2
            tokens = tokens_for_landmarks(2 * width)
            yield PhasePlan("landmarks", tokens, tokens * (1 + PLACING) * self.speed.layers)
        if self.recipe.analog.windows_by_head:
            _, tokens = long_texts(self.state_budget, self.reach)
            yield PhasePlan("windows", tokens, tokens * (1 + DIVIDING) * self.speed.layers)

    @property
    def _compared(self) -> float:
        """Logits of a token, and their comparison with softmax's."""
        return (1 + COMPARING) * self.speed.logits

    def beside(self, config: StageConfig | None) -> int:
        """Tokens that a measure beside a stage reads, by `ConversionText.validation_beside`."""
        if config is None:
            return self.validation
        sequences = sequences_beside(config, self.length, self.length)
        return min(self.validation, sequences * self.length)

    def conversion(self) -> PhasePlan:
        """The test, and softmax with the layers' distances beside it and the model."""
        tokens = self.beside(next(iter(self.recipe.stages), None))
        layers = TESTED * self.length + (MEASURED + LINEAR) * tokens
        seconds = layers * self.speed.layers + 2 * tokens * self._compared
        return PhasePlan("convert", 2 * tokens + self.length, seconds)

    def ranking(self, criterion: Criterion, planned: ConversionPlan) -> Iterator[PhasePlan]:
        """Candidates that are trained, where the recipe does; softmax, and the layers from the
        first linear one on of every choice that is compared."""
        choices = choices_of(criterion, [one.layer for one in planned.converted])
        if self.recipe.selection:
            first = self.recipe.whole[0]
            steps = round(self.recipe.selection * first.fit.steps) * sum(map(bool, choices))
            read = steps * planned.stages[self.recipe.stages.index(first)].tokens
            read //= max(1, first.fit.steps)
            yield PhasePlan("candidates", read, read * self._step(first))
        shares = [1 - min(layers, default=0) / len(planned.caches) for layers in choices]
        tokens = min(self.validation, COMPARISON_SEQUENCES * self.length)
        layers = (1 + LINEAR * sum(shares)) * self.speed.layers
        seconds = tokens * (layers + (1 + len(choices)) * self._compared)
        yield PhasePlan("rank-layers", tokens * (1 + len(choices)), seconds)

    def measuring(self, config: StageConfig) -> PhasePlan:
        """The model beside softmax, which is known."""
        tokens = self.beside(config)
        seconds = tokens * (LINEAR * self.speed.layers + 2 * self._compared)
        return PhasePlan(f"{config.name}, measured", tokens, seconds)

    def stage(self, config: StageConfig, planned: StagePlan) -> Iterator[PhasePlan]:
        """Its steps, its validations, of which the one before it is known unless it is of other
        sequences or another loss, and what is measured then."""
        if isinstance(config, AdaptationConfig):
            validated = LINEAR * self.speed.layers + self.speed.logits
            known = config.length is None and not config.softmax
        else:
            validated = MEASURED * self.speed.layers
            first = isinstance(config, TransferConfig) and config.loss == TransferLoss()
            known = first and config.length is None
        times = -(-config.fit.steps // config.fit.every.evaluation) + (0 if known else 1)
        read = times * self.beside(config)
        seconds = planned.tokens * self._step(config) + read * validated
        yield PhasePlan(planned.name, planned.tokens + read, seconds)
        if config.by_layer:
            yield self.measuring(config)

    def _step(self, config: StageConfig) -> float:
        """A token of an update."""
        if isinstance(config, AdaptationConfig):
            return (ADAPTATION + (1 if config.loss.kl else 0)) * self.speed.forward
        return TRANSFER * self.speed.layers

    def evaluation(self, planned: ConversionPlan) -> PhasePlan:
        """What is not known yet of softmax and the model, further modes on the validation text,
        recall and samples."""
        stages = (*self.recipe.stages[:1], *self.recipe.stages[-1:]) or (None,)
        unknown = [self.validation - self.beside(config) for config in stages]
        room = max(self.validation, sum(stage.tokens for stage in planned.stages))
        sequences = sequences_of_further(room, ABLATED, self.length)
        further = ABLATED * min(self.validation, sequences * self.length)
        chosen, _ = choose_distances(self.length, self.reach, self.validation, RECALLED, room)
        recall = RECALLED * sum(
            (distance + PASSAGE) * sequences_at(distance, self.validation, most)
            for distance, most in chosen.items()
        )
        layers = MEASURED * (further + recall + sum(unknown)) + SAMPLED
        compared = (2 * self.validation + further) * self._compared
        tokens = 2 * self.validation + further + recall
        seconds = layers * self.speed.layers + compared + PAGE
        return PhasePlan("eval, report, export", tokens, seconds)
