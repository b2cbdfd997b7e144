"""A conversion as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastweights.linearize.distill.budget import CacheBudget, LayerBudget, SoftmaxBudget
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.evaluate.criteria import Criterion
from fastweights.linearize.evaluate.ranking import Ranking
from fastweights.ranges import NON_NEGATIVE_INTEGER
from fastweights.render.units import bytes_in_words
from fastweights.training.data.documents import Data

LANDMARK_TOKENS = 16_384
"""Of the training text, among whose keys landmarks are placed, at most."""


@dataclass(frozen=True)
class Conversion:
    """Everything that decides the result of a conversion.

    Attributes:
        model: The softmax model: a folder, or a name on the Hugging Face hub.
        data: The text to train and validate on.
        recipe: What replaces softmax attention, and how it is trained.
        layers: Numbers of the layers to convert; None for all that can be.
        softmax_layers: How many of them become softmax again: the first of the ranking.
        dtype: Dtype of the model's own weights, such as "bfloat16"; "auto" for the checkpoint's.
        seed: Seed of the order of the text, and of what branches and adapters start from.
        bits: Bits of the frozen weights while the rest is trained, 4 or 8 (bitsandbytes); None for
            `dtype`. The result has its weights in `dtype` all the same.
        rank_by: By what layers are ranked; None for recall, where the text can show it, and for
            damage where it cannot.
        ranking: The ranking of another run of the same model; None to rank by `rank_by`.
        cache_budget: What the cache may take, in place of `softmax_layers`; None for a number.
        state_budget: Bytes of the linear layers' states, per sequence, which the windows of key
            heads are divided in; None for those of the recipe's window.

    Raises:
        ValueError: If a number lies outside of its range, a window covers every sequence, `bits`
            is given with a recipe that trains the model's own weights, or what is said of softmax
            layers contradicts itself.
    """

    model: str
    data: Data
    recipe: LinearizationRecipe = LinearizationRecipe()
    layers: tuple[int, ...] | None = None
    softmax_layers: int = 0
    dtype: str = "auto"
    seed: int = 0
    bits: int | None = None
    rank_by: Criterion | None = None
    ranking: Ranking | None = None
    cache_budget: CacheBudget | None = None
    state_budget: int | None = None

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(softmax_layers=self.softmax_layers, seed=self.seed)
        _require_dtype(self.dtype)
        self._require_window()
        self._require_landmarks()
        self._require_selection()
        if self.bits not in (None, 4, 8):
            raise ValueError(
                f"bits={self.bits}: the frozen weights have 4 or 8, or None to leave them as"
                " they are"
            )
        if self.bits is not None and self.recipe.changes_weights:
            raise ValueError(
                f"bits={self.bits} with a recipe that trains the model's own weights: quantised"
                " ones are not trained"
            )

    def _require_window(self) -> None:
        analog = self.recipe.analog
        for length in self.lengths:
            if analog.has_window and analog.window >= length:
                raise ValueError(
                    f"window = {analog.window} reaches over every sequence of length = {length}, so"
                    " that the linear attention before it would learn nothing; take longer"
                    " sequences or a smaller window"
                )

    def _require_landmarks(self) -> None:
        analog = self.recipe.analog
        landmarks = 2 * (analog.feature_dim or 0)
        if self.state_budget is not None and not analog.windows_by_head:
            raise ValueError(
                f"state_budget = {bytes_in_words(self.state_budget)} with a recipe that gives all"
                " heads one window: take one with windows_by_head, such as landmarks"
            )
        if analog.features == "landmarks" and landmarks > LANDMARK_TOKENS:
            raise ValueError(
                f"feature_dim = {analog.feature_dim:,} makes {landmarks:,} landmarks in each head,"
                f" placed among the keys of {LANDMARK_TOKENS:,} tokens: take"
                f" {LANDMARK_TOKENS // 2:,} columns or fewer"
            )

    def _require_selection(self) -> None:
        if self.softmax_layers and self.cache_budget is not None:
            raise ValueError(
                f"softmax_layers = {self.softmax_layers} and a budget of"
                f" {bytes_in_words(self.cache_budget.size)} for the cache: give one of the two"
            )
        if self.ranking is not None:
            require_ranking_alone(self.ranking, self.rank_by, self.budget)

    @property
    def budget(self) -> SoftmaxBudget:
        """What the layers that stay softmax may take."""
        return self.cache_budget or LayerBudget(self.softmax_layers)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the sequences in all stages, that of the data first."""
        own = (stage.length for stage in self.recipe.stages if stage.length is not None)
        return tuple(dict.fromkeys((self.data.length, *own)))


def require_ranking_alone(
    ranking: Ranking, rank_by: Criterion | None, budget: SoftmaxBudget
) -> None:
    """Check what a ranking is given with.

    Raises:
        ValueError: If it is a criterion to rank by, too, or nothing to choose by the ranking.
    """
    if rank_by is not None:
        raise ValueError(
            f"a ranking by {ranking.criterion} is given, and a criterion to rank by: give one of"
            " the two"
        )
    if budget == LayerBudget(0):
        raise ValueError(
            "a ranking is given, and no layer stays softmax: give softmax_layers or cache_budget,"
            " too, or leave the ranking out"
        )


def _require_dtype(name: str) -> None:
    if name != "auto" and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(
            f"dtype = {name!r}; take the name of a dtype of torch, such as float32 or bfloat16, or"
            " auto for the checkpoint's"
        )
