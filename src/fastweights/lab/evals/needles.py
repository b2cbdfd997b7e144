"""A number hidden in a long text: how often a language model finds it, by the length of the text
and where in it the number stands (RULER's niah_single, Hsieh et al., 2024; MetaLA, Table A8)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastweights.errors import DataError
from fastweights.lab.evals.items import Ending
from fastweights.lab.evals.score import score
from fastweights.lab.tasks.needle import HAY, HiddenNumber
from fastweights.ranges import DEPTHS, POSITIVE_INTEGER
from fastweights.render.plots import HEAT, canvas, label
from fastweights.training.loop.report import Follow, unfollowed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SENTENCES = re.compile(r"(?<=[.!?])\s+")
FEWEST = 4
"""Sentences that a text has at least, for a number to have places in it."""


@dataclass(frozen=True)
class NeedleGrid:
    """Where numbers are hidden, and in how long texts.

    Attributes:
        lengths: Tokens of a text with its question and answer, at most; ascending.
        depths: Number of places of the hidden number, evenly from the beginning of the text to its
            end.
        repeats: Numbers that are asked for at each length and depth.
        seed: Seed of all choices; the same grid has the same texts.

    Raises:
        ValueError: If a number lies outside of its range, or lengths do not ascend.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    depths: int = 5
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        POSITIVE_INTEGER.require(repeats=self.repeats)
        DEPTHS.require(depths=self.depths)
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(
                f"the lengths {self.lengths} do not ascend; name each once, the shortest first"
            )

    @property
    def places(self) -> np.ndarray:
        """The depths ``[depths]``, from 0 (the beginning) to 1 (the end)."""
        return np.linspace(0, 1, self.depths)


@dataclass(frozen=True, eq=False)
class NeedleScores:
    """How often a model finds hidden numbers.

    Attributes:
        grid: Where they are hidden.
        accuracy: ``[lengths depths]``, the fraction of numbers whose every token is the likeliest.
        nll: ``[lengths depths]``, the mean of -log p of a number, in nats.
    """

    grid: NeedleGrid
    accuracy: np.ndarray
    nll: np.ndarray

    @property
    def mean(self) -> float:
        """The mean accuracy."""
        return float(self.accuracy.mean())

    @property
    def weighted_mean(self) -> float:
        """The mean accuracy where the n-th length weighs n (RULER's wAvg, ascending)."""
        weights = np.arange(1, 1 + len(self.grid.lengths))
        return float(np.average(self.accuracy.mean(1), weights=weights))

    def record(self) -> dict[str, Any]:
        """Return all numbers, for a JSON file."""
        return {
            **asdict(self.grid),
            "accuracy": self.accuracy.tolist(),
            "nll": self.nll.tolist(),
            "mean": self.mean,
            "weighted_mean": self.weighted_mean,
        }


def measure_needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    grid: NeedleGrid,
    text: str | None = None,
    *,
    batch: int = 8,
    follow: Follow = unfollowed,
) -> NeedleScores:
    """Ask a language model for numbers that are hidden in texts.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        grid: Where the numbers are hidden.
        text: What the texts are taken from, whole sentences from a random one on; None for RULER's
            five short sentences again and again.
        batch: Texts that are read at once.
        follow: Told of every length and depth.

    Raises:
        DataError: If `text` has too few sentences.
        ValueError: If a length has no room for the question.
    """
    hay = _Hay.of(tokenizer, text)
    items = {
        (row, column): [
            hay.hide(np.random.default_rng([grid.seed, row, column, number]), length, depth)
            for number in range(grid.repeats)
        ]
        for row, length in enumerate(grid.lengths)
        for column, depth in enumerate(grid.places)
    }
    scores = np.zeros((2, len(grid.lengths), grid.depths))
    for place in follow(items, "looking for numbers"):
        found = score(model, tokenizer, items[place], batch=batch).metrics
        scores[:, *place] = found["accuracy"], found["nll"]
    return NeedleScores(grid, *scores)


@dataclass(frozen=True)
class _Hay:
    """Sentences that numbers are hidden among, and what is between them."""

    tokenizer: Any
    sentences: Sequence[str]
    between: str

    @classmethod
    def of(cls, tokenizer: Any, text: str | None) -> _Hay:
        if text is None:
            return cls(tokenizer, [HAY], "\n")
        sentences = [found for x in _SENTENCES.split(text) if (found := " ".join(x.split()))]
        if len(sentences) < FEWEST:
            raise DataError(
                f"a text of {len(sentences)} sentences is too short to hide a number in; give a"
                " longer one, or none for sentences that are repeated"
            )
        return cls(tokenizer, sentences, " ")

    def hide(self, generator: np.random.Generator, length: int, depth: float) -> Ending:
        """A text of at most `length` tokens that ends in the question for a number."""
        hidden = HiddenNumber.draw(generator)
        beside = self._tokens(_whole(_ending(hidden, [], depth, self.between)))
        hay = self._take(int(generator.integers(len(self.sentences))), length - beside)
        while hay:
            ending = _ending(hidden, hay, depth, self.between)
            if self._tokens(_whole(ending)) <= length:
                return ending
            hay.pop()
        raise ValueError(
            f"{length} tokens have no room for a sentence beside the question for a number; take"
            f" texts of at least {2 * beside} tokens"
        )

    def _take(self, first: int, room: int) -> list[str]:
        """Sentences from one on, of about so many tokens."""
        taken = list[str]()
        while room > 0:
            sentence = self.sentences[(first + len(taken)) % len(self.sentences)]
            room -= self._tokens(self.between + sentence)
            taken.append(sentence)
        return taken

    def _tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def _ending(hidden: HiddenNumber, hay: Sequence[str], depth: float, between: str) -> Ending:
    return Ending(hidden.hide(hay, depth, between).text, f" {hidden.number}")


def _whole(ending: Ending) -> str:
    return ending.context + ending.continuation


def draw(scores: Mapping[str, NeedleScores]) -> Figure:
    """Draw how often models find numbers, and how unlikely these are to them, by length and depth.

    Args:
        scores: The models' scores by name.
    """
    figure, axes = canvas(2, len(scores))
    worst = max(float(one.nll.max()) for one in scores.values())
    for column, (name, one) in enumerate(scores.items()):
        _cells(axes[0, column], one.grid, one.accuracy, 1.0, "{:.0%}")
        _cells(axes[1, column], one.grid, one.nll, worst, "{:.1f}")
        label(axes[0, column], f"{name}: numbers found", "", "tokens")
        label(axes[1, column], "nats of a number", "depth of the number", "tokens")
    return figure


def _cells(axes: Axes, grid: NeedleGrid, values: np.ndarray, most: float, form: str) -> None:
    axes.imshow(values, aspect="auto", cmap=HEAT, vmin=0, vmax=1.3 * most or 1)
    axes.grid(visible=False)
    axes.set_xticks(range(grid.depths), [f"{place:.0%}" for place in grid.places])
    axes.set_yticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths])
    for (row, column), value in np.ndenumerate(values):
        color = "white" if value > most / 2 else "black"
        axes.text(column, row, form.format(value), ha="center", va="center", color=color, size=7)
