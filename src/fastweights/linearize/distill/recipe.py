"""A recipe as a value: what replaces softmax attention, and the stages in which it is trained."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.distill.adapt import TokenLoss
from fastweights.linearize.distill.align import HiddenLoss
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.trained import Adapters, Attentions, Branches, Trained
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.ranges import PROBABILITY, SEQUENCE_LENGTH
from fastweights.training.loop.optimizers import AdamW

TRANSFER = Fit(steps=400)
"""Of attention transfer: a rate of 1e-2 with a straight decay; 200 steps of 8 · 1024 tokens are
enough on LoLCATs' zero-shot tasks.
"""
ADAPT = Fit(steps=400, optimizer=AdamW(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0))
"""Of adaptation."""
ALIGN = Fit(steps=400, optimizer=AdamW(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0))
"""Of hidden-state alignment."""

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_TAKEN = frozenset(
    {
        *("adapter", "convert", "data", "eval", "evaluation", "export", "model", "plan"),
        *("positions", "rank-layers", "ranking", "report", "results", "run", "teacher"),
    }
)
"""Names that mean something else in a run's folder, or on the command line."""


class StageConfig(ABC):
    """The settings of one stage.

    Attributes:
        name: Name of the stage, and of its folder in the run's.
        length: Tokens per sequence; None for the conversion's.
        fit: Steps, batch, optimiser and schedule.
    """

    by_layer: ClassVar[bool]
    """Whether every layer learns from what it reads in the softmax model, whatever others do."""

    name: str
    length: int | None
    fit: Fit

    @property
    def trained(self) -> Trained:
        """What is trained."""
        raise NotImplementedError

    def tokens_between_validations(self, length: int) -> int:
        """Return how many tokens are trained on between two validations, in sequences of `length`
        tokens unless the stage has a length of its own."""
        updates = min(self.fit.steps, self.fit.every.evaluation)
        return updates * self.fit.batch * (self.length or length)

    def with_fit(self, fit: Fit) -> StageConfig:
        """Return the stage with other steps, or another batch, optimiser or schedule."""
        return replace(self, fit=fit)  # type: ignore[type-var]

    def _require_name_and_length(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN:
            raise ValueError(
                f"a stage cannot be called {self.name!r}: it is a name of lower-case letters,"
                f" digits and hyphens, and none of {', '.join(sorted(_TAKEN))}"
            )
        if self.length is not None:
            SEQUENCE_LENGTH.require(length=self.length)


@dataclass(frozen=True)
class TransferConfig(StageConfig):
    """Attention transfer: the branch of every layer learns to reproduce its softmax.

    Attributes:
        loss: How far a layer is from its softmax.
        dropout: The probability with which a layer is trained without its window; 1 trains the
            linear side alone (arXiv 2510.05901).
        fit: Steps, batch, optimiser and schedule.
        blockwise: True to train one block of the model after another, with the hidden states on
            disk, for models larger than memory. The result is that of the last step.
        name: Name of the stage, and of its folder in the run's.
        length: Tokens per sequence; None for the conversion's.

    Raises:
        ValueError: If the name is no name.
        TrainingError: If a number lies outside of its range.
    """

    by_layer: ClassVar[bool] = True
    loss: TransferLoss = TransferLoss()
    dropout: float = 0.0
    fit: Fit = TRANSFER
    blockwise: bool = False
    name: str = "transfer"
    length: int | None = None

    def __post_init__(self) -> None:
        self._require_name_and_length()
        PROBABILITY.require(dropout=self.dropout)

    @property
    def trained(self) -> Trained:
        return Branches()


@dataclass(frozen=True)
class AlignmentConfig(StageConfig):
    """Hidden-state alignment: every layer learns to give what the softmax model's own layer gives.

    Attributes:
        trained: What is trained.
        loss: How far a layer is from the softmax model's.
        fit: Steps, batch, optimiser and schedule.
        name: Name of the stage, and of its folder in the run's.
        length: Tokens per sequence; None for the conversion's.

    Raises:
        ValueError: If the name is no name, or more is trained than what the loss compares.
        TrainingError: If the length is below 2.
    """

    by_layer: ClassVar[bool] = True
    trained: Trained = Attentions()  # type: ignore[assignment]
    loss: HiddenLoss = HiddenLoss()
    fit: Fit = ALIGN
    name: str = "hidden"
    length: int | None = None

    def __post_init__(self) -> None:
        self._require_name_and_length()
        if not isinstance(self.trained, Branches | Attentions):
            raise ValueError(
                f"{self.name}: an alignment of layers trains Branches or Attentions, and not"
                f" {type(self.trained).__name__}, since other layers are those of the teacher"
            )


@dataclass(frozen=True)
class AdaptationConfig(StageConfig):
    """Adaptation: the model as a whole learns the next token, with its linear layers.

    Attributes:
        trained: What is trained.
        loss: The loss of the next token.
        fit: Steps, batch, optimiser and schedule.
        softmax: The share of the converted layers that is softmax still, one of every 1 / softmax;
            0 for none.
        dropout: The probability with which a layer is trained without its window.
        name: Name of the stage, and of its folder in the run's.
        length: Tokens per sequence; None for the conversion's.

    Raises:
        ValueError: If the name is no name.
        TrainingError: If a number lies outside of its range.
    """

    by_layer: ClassVar[bool] = False
    trained: Trained = Adapters()  # type: ignore[assignment]
    loss: TokenLoss = TokenLoss()
    fit: Fit = ADAPT
    softmax: float = 0.0
    dropout: float = 0.0
    name: str = "finetune"
    length: int | None = None

    def __post_init__(self) -> None:
        self._require_name_and_length()
        if not 0 <= self.softmax <= 0.5:
            raise ValueError(
                f"softmax = {self.softmax}; one of every 1 / softmax layers stays softmax: it is"
                " from 0 to 0.5"
            )
        PROBABILITY.require(dropout=self.dropout)


@dataclass(frozen=True)
class LinearizationRecipe:
    """What replaces softmax attention, and the stages in which it is trained, in their order.

    Stages by layer come first; layers are ranked between them and the others.

    Attributes:
        analog: The linear attention.
        stages: The stages.
        selection: How long every candidate is trained before layers are ranked, as a share of the
            first adaptation's steps; 0 to rank them as they are.

    Raises:
        ValueError: If two stages have one name or come in no possible order, if some train adapters
            and others the weights under them, or if one asks for what the linear attention does not
            have.
        TrainingError: If `selection` is no share.
    """

    analog: LinearAttentionConfig = LinearAttentionConfig()
    stages: tuple[StageConfig, ...] = (TransferConfig(), AdaptationConfig())
    selection: float = 0.0

    def __post_init__(self) -> None:
        PROBABILITY.require(selection=self.selection)
        if self.selection and not self.whole:
            raise ValueError(
                f"selection = {self.selection} of the steps of an adaptation, and the recipe has"
                " none; add one, or leave selection out"
            )
        self._require_order()
        self._require_own_softmax()
        for stage in self.stages:
            _require_window(self.analog, stage)
            _require_maps(self.analog, stage)
        if self.adapters and self.changes_weights:
            raise ValueError(
                "a recipe trains either adapters or the model's own weights; these stages train"
                f" both: {', '.join(stage.name for stage in self.stages)}"
            )
        if len({stage.trained.lora for stage in self.stages if _adapts(stage)}) > 1:  # type: ignore[attr-defined]
            raise ValueError("all stages with adapters train the same ones; give them one lora")

    def _require_order(self) -> None:
        names = [stage.name for stage in self.stages]
        if len({*names}) < len(names):
            raise ValueError(f"two stages of {', '.join(names)} have one name; rename one of them")
        if [*self.by_layer, *self.whole] != [*self.stages]:
            raise ValueError(
                f"the stages {', '.join(names)} are in no possible order: those that train layer by"
                " layer (TransferConfig, AlignmentConfig) come before all others"
            )

    def _require_own_softmax(self) -> None:
        changed = False
        for stage in self.stages:
            if changed and isinstance(stage, TransferConfig):
                raise ValueError(
                    f"{stage.name} compares branches with the softmax of their own attentions, and"
                    " a stage before it changes these; put it first"
                )
            changed |= stage.trained.changes_weights

    @property
    def by_layer(self) -> tuple[StageConfig, ...]:
        """The stages in which layers learn from what they read in the softmax model."""
        return tuple(stage for stage in self.stages if stage.by_layer)

    @property
    def compares_weights(self) -> bool:
        """Whether a stage trains by attention weights alone, so that these tell what it gained."""
        return any(isinstance(s, TransferConfig) and not s.loss.output for s in self.stages)

    @property
    def whole(self) -> tuple[AdaptationConfig, ...]:
        """The stages in which the model adapts as a whole."""
        return tuple(stage for stage in self.stages if isinstance(stage, AdaptationConfig))

    @property
    def adapters(self) -> bool:
        """Whether there are adapters in the end."""
        return any(map(_adapts, self.stages))

    @property
    def changes_weights(self) -> bool:
        """Whether a stage changes the model's own weights."""
        return any(stage.trained.changes_weights for stage in self.stages)

    def with_stages(self, stages: Iterable[StageConfig]) -> LinearizationRecipe:
        """Return the recipe with other stages; without an adaptation no candidates are trained."""
        stages = tuple(stages)
        whole = any(isinstance(stage, AdaptationConfig) for stage in stages)
        return replace(self, stages=stages, selection=self.selection if whole else 0.0)


def _adapts(stage: StageConfig) -> bool:
    return isinstance(stage.trained, Adapters)


def _require_window(analog: LinearAttentionConfig, stage: StageConfig) -> None:
    """Raise ValueError if `stage` hides a window that there is not."""
    dropout = getattr(stage, "dropout", 0.0)
    if dropout and not analog.has_window:
        raise ValueError(
            f"dropout = {dropout} hides a window of softmax, and window = {analog.window} is none;"
            " leave dropout out, or take a window above 0"
        )


def _require_maps(analog: LinearAttentionConfig, stage: StageConfig) -> None:
    """Raise ValueError if `stage` compares weights that there are not."""
    has_weights = analog.rule == "windowed" or analog.has_window
    if isinstance(stage, TransferConfig) and stage.loss.weights and not has_weights:
        raise ValueError(
            f"rule = {analog.rule!r} without a window has no attention weights that the transfer"
            " could compare with softmax's; take a window, or a recipe whose loss compares outputs,"
            " such as lolcats, or maps (MOHAWK's)"
        )
