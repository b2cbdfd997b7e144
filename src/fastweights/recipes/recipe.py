"""What a recipe is: a published training as a value, each number with its place in the paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from fastweights.budget import Placing, Workload, find_accelerator
from fastweights.linearize.distill.recipe import LinearizationRecipe, StageConfig, TransferConfig
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.models import FastWeightsConfig, find_preset

V = TypeVar("V")


@dataclass(frozen=True)
class Stated(Generic[V]):
    """A number of a recipe, and who says so.

    Attributes:
        value: The number, or the words.
        place: Section or table of the paper; "ours: …" with a reason where it is silent.
    """

    value: V
    place: str


@dataclass(frozen=True)
class TableRow:
    """A row of a paper's table.

    Attributes:
        table: The table, such as "MetaLA, Table 4".
        row: The row in the paper's words.
        recipe: The name of the recipe that trains it; "" if there is none.
        otherwise: Without a recipe: the command that does it, or why none does.
        gaps: What the recipe or command does otherwise than the paper.
    """

    table: str
    row: str
    recipe: str = ""
    otherwise: str = ""
    gaps: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Whether one command starts it."""
        return bool(self.recipe) or self.otherwise.startswith("fastweights ")


def rows_of(
    recipes: Iterable[Recipe],
    tables: Mapping[str, Mapping[str, str]],
    gaps: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[TableRow, ...]:
    """The rows of tables, each beside its recipe's name, or the words on what else there is; `gaps`
    has by tables what other commands do otherwise."""
    known = {recipe.name: recipe for recipe in recipes}
    return tuple(
        TableRow(table, row, by, gaps=known[by].gaps)
        if by in known
        else TableRow(table, row, otherwise=by, gaps=gaps.get(table, ()))
        for table, rows in tables.items()
        for row, by in rows.items()
    )


@dataclass(frozen=True)
class Recipe:
    """What recipes of new models and of conversions have in common.

    Attributes:
        name: What the command calls it.
        paper: Whose training it is.
        data: What it trained on.
        source: The same as ``--data`` takes it.
        hardware: What it was trained on.
        device: The name of the accelerator that plans are made for unless told otherwise.
        devices: How many of them.
        hours: How long it took.
        tokens: Tokens that are trained on.
        length: Tokens per sequence.
        batch: Sequences per update.
        gaps: What the command cannot be told, or does otherwise.
    """

    name: str
    paper: str
    data: Stated[str]
    source: str
    hardware: Stated[str]
    device: str
    devices: Stated[int]
    hours: Stated[str]
    tokens: Stated[float]
    length: Stated[int]
    batch: Stated[int]
    gaps: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Updates until all tokens are seen; the last batch is a full one."""
        return self.workload(Placing()).steps

    def workload(self, placing: Placing) -> Workload:
        """What is trained on what, on the recipe's devices placed as given."""
        return Workload(
            tokens=self.tokens.value,
            length=self.length.value,
            batch=self.batch.value,
            device=find_accelerator(self.device),
            placing=placing,
        )


@dataclass(frozen=True)
class TrainingRecipe(Recipe):
    """The training of a new language model.

    Attributes:
        preset: Its architecture, a name of `fastweights.PRESETS`.
        parameters: Their published number.
        tokenizer: What cuts the text.
        lr: Peak learning rate.
        schedule: How it changes.
        warmup: Updates of the warm-up.
        betas: AdamW's coefficients.
        weight_decay: Of matrices.
        clip: Largest norm of the gradient.
        precision: Of the products.
        stream: Whether the text is tokenized while it is trained on: one that is read once.
    """

    preset: str
    parameters: Stated[float]
    tokenizer: Stated[str]
    lr: Stated[float]
    schedule: Stated[str]
    warmup: Stated[int]
    betas: Stated[tuple[float, float]]
    weight_decay: Stated[float]
    clip: Stated[float]
    precision: Stated[str]
    stream: bool = True

    def config(self) -> FastWeightsConfig:
        """The model's configuration."""
        return find_preset(self.preset).config()


@dataclass(frozen=True)
class ConversionRecipe(Recipe):
    """The linearization of a pretrained softmax model; its tokens are those of both stages.

    Attributes:
        model: The softmax model, by its name on the Hugging Face hub.
        shape: Fields of its configuration, from which plans are made without the hub.
        recipe: A name of `linearize.distill.recipes.RECIPES`.
        features: The feature map.
        window: Tokens of softmax attention.
        rank: Of the adapters; 0 if all weights are trained.
        transfer_lr: Learning rate of stage one, and
        finetune_lr: of stage two.
        transfer_tokens: Tokens of stage one; 0 leaves it out.
        dtype: Of the model's own weights.
    """

    model: Stated[str]
    shape: Stated[dict[str, int | bool | float]]
    recipe: str
    features: Stated[str]
    window: Stated[int]
    rank: Stated[int]
    transfer_lr: Stated[float]
    finetune_lr: Stated[float]
    transfer_tokens: Stated[float]
    dtype: str = "bfloat16"

    @property
    def stage_steps(self) -> dict[str, int]:
        """Updates of attention transfer, if there is one, and of adaptation."""
        per_step = self.batch.value * self.length.value
        transfer = self.transfer_tokens.value
        tokens = {"transfer": transfer, "finetune": self.tokens.value - transfer}
        return {stage.name: -(-int(tokens[stage.name]) // per_step) for stage in self._stages}

    @property
    def settings(self) -> LinearizationRecipe:
        """The stages as this library has them."""
        recipe = RECIPES[self.recipe]
        analog = replace(recipe.analog, features=self.features.value, window=self.window.value)
        return replace(recipe, analog=analog).with_stages(self._stages)

    @property
    def _stages(self) -> list[StageConfig]:
        stages = RECIPES[self.recipe].stages
        return [
            stage
            for stage in stages
            if self.transfer_tokens.value or not isinstance(stage, TransferConfig)
        ]
