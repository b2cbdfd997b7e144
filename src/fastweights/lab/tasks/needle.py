"""A needle in a haystack: of tokens, for models trained on it, and of text, for language models
(RULER's form).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastweights.lab.tasks.base import Batch, TokenTask
from fastweights.lab.tasks.protocol import Backbone, Protocol, Segment, TrainingSettings
from fastweights.lab.tasks.questions import Question
from fastweights.lab.tasks.sampling import sample_distinct
from fastweights.models.loss import IGNORE_INDEX
from fastweights.training.loop.schedules import CosineAnnealing

MARK = 0


@dataclass(frozen=True)
class Needle(TokenTask):
    """A needle in a haystack of tokens: filler hides a mark, a key and its value; the end asks for
    the key.

    The last tokens repeat the mark and the key, and the labels of the last `answer` tokens are the
    value: each token predicts the next one, from the key to the value's last token but one. Token 0
    is the mark; the lower half of the other tokens are filler, the upper half make up keys and
    values.

    Attributes:
        vocabulary: Number of different tokens.
        length: Tokens per sequence.
        answer: Tokens of the value.
        others: Number of further needles, with other keys, at random places.
        depth: Where the needle lies, from 0 (first) to 1 (last before the question); None for
            anywhere.

    Raises:
        ValueError: If the needles do not fit into `length`, or `depth` is not a fraction.
    """

    vocabulary: int = 256
    length: int = 256
    answer: int = 1
    others: int = 0
    depth: float | None = None

    def __post_init__(self) -> None:
        if self.places < self.others + 1:
            raise ValueError(
                f"Needle(length={self.length}, answer={self.answer}, others={self.others}) has room"
                f" for {self.places} needles; take a length of at least"
                f" {self._size * (self.others + 1) + self.answer + 1}"
            )
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ValueError(
                f"Needle(depth={self.depth}): depth is a fraction of the haystack; take a number"
                " from 0 to 1, or None"
            )

    @property
    def _size(self) -> int:
        return 2 + self.answer

    @property
    def places(self) -> int:
        """Number of places where a needle may lie: the haystack is divided into pieces of a
        needle's size."""
        return (self.length - self.answer - 1) // self._size

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        half, needles = 1 + (self.vocabulary - 1) // 2, self.others + 1
        inputs = generator.integers(1, half, size=(count, self.length))
        keys = half + sample_distinct(generator, count, needles, self.vocabulary - half)
        values = generator.integers(half, self.vocabulary, size=(count, needles, self.answer))
        starts = self._size * self._chosen(generator, count)
        needle = np.concatenate(
            [np.full((count, needles, 1), MARK), keys[..., None], values], axis=2
        )
        spots = starts[..., None] + np.arange(self._size)
        np.put_along_axis(inputs, spots.reshape(count, -1), needle.reshape(count, -1), 1)
        inputs[:, -self.answer - 1 :] = needle[:, 0, :-1]
        labels = np.full_like(inputs, IGNORE_INDEX)
        labels[:, -self.answer :] = values[:, 0]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))

    def _chosen(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """``[n needles]`` different places, the asked needle's first."""
        if self.depth is None:
            return sample_distinct(generator, count, self.others + 1, self.places)
        place = round(self.depth * (self.places - 1))
        if self.others == 0:
            return np.full((count, 1), place)
        rest = sample_distinct(generator, count, self.others, self.places - 1)
        return np.concatenate([np.full((count, 1), place), rest + (rest >= place)], axis=1)


HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ADJECTIVES = (
    "amber",
    "brave",
    "calm",
    "distant",
    "early",
    "faint",
    "gentle",
    "hollow",
    "idle",
    "jolly",
)
NOUNS = (
    "anchor",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "harbour",
    "island",
    "jacket",
)


@dataclass(frozen=True)
class HiddenNumber:
    """A number that a text tells for a name, and that is asked for at its end, in the words of
    RULER's niah_single (Hsieh et al., 2024); the names are drawn from a list of our own.

    Attributes:
        name: The name.
        number: Its number, of seven digits.
    """

    name: str
    number: str

    @classmethod
    def draw(cls, generator: np.random.Generator) -> HiddenNumber:
        """Draw a name and a number."""
        name = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
        return cls(name, str(generator.integers(1_000_000, 10_000_000)))

    def hide(self, hay: Sequence[str], depth: float, between: str = "\n") -> Question:
        """Write a text that ends in the question for the number.

        Args:
            hay: The sentences that the number is hidden among, such as repetitions of `HAY`.
            depth: Where among them it stands, from 0 (the beginning) to 1 (the end).
            between: What separates them.
        """
        place = round(depth * len(hay))
        needle = f"One of the special magic numbers for {self.name} is: {self.number}."
        asked = f"the special magic number for {self.name} mentioned in the provided text"
        return Question(
            "A special magic number is hidden within the following text. Make sure to memorize it."
            " I will quiz you about the number afterwards.\n"
            + between.join([*hay[:place], needle, *hay[place:]])
            + f"\nWhat is {asked}? The special magic number for {self.name} mentioned in the"
            " provided text is",
            (self.number,),
        )


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

PROTOCOLS: dict[str, Protocol] = {
    "needle-small": Protocol(
        train=(Segment(Needle(length=128), None),),
        test=tuple(
            Segment(Needle(length=t, depth=d), 200) for t in (128, 256, 512) for d in DEPTHS
        ),
        training=TrainingSettings(
            (1e-3, 3e-3), (0.1,), 64, steps=2_000, schedule=CosineAnnealing(0.1), clip=1.0
        ),
        backbone=Backbone({"num_hidden_layers": 2}, (64,)),
        source="this library",
        differs="MetaLA's Table A8 does not say what its needles, haystacks and prompts are",
    )
}
