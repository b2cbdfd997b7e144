"""State tracking: parity (MesaNet, appendix H), word problems of groups (Merrill et al., 2024),
modular arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
import torch

from fastweights.lab.tasks.base import Batch, TokenTask
from fastweights.lab.tasks.protocol import Backbone, Fields, Protocol, Segment, TrainingSettings
from fastweights.models.loss import IGNORE_INDEX
from fastweights.training.loop.schedules import Constant, CosineAnnealing


class Group(ABC):
    """A finite group, its elements numbered from 0; groups are compared by value."""

    @property
    @abstractmethod
    def order(self) -> int:
        """Number of elements."""

    @property
    @abstractmethod
    def table(self) -> np.ndarray:
        """The composition table ``[order order]``: the number of "first a, then b"."""


@dataclass(frozen=True)
class Cyclic(Group):
    """The cyclic group Z_m: sums modulo m, each element being its own number; Z_2 is parity."""

    m: int

    @property
    def order(self) -> int:
        return self.m

    @property
    def table(self) -> np.ndarray:
        return np.add.outer(np.arange(self.m), np.arange(self.m)) % self.m


@dataclass(frozen=True)
class Permutations(Group):
    """The symmetric group S_n in lexicographic order or, with `even`, the alternating group A_n.

    S_5 and A_5 are not solvable: their word problems are NC¹-complete.
    """

    n: int
    even: bool = False

    @property
    def order(self) -> int:
        return len(_permutations(self.n, self.even))

    @property
    def table(self) -> np.ndarray:
        return _composition_table(self.n, self.even)


@lru_cache
def _permutations(n: int, even: bool) -> list[tuple[int, ...]]:
    return [p for p in permutations(range(n)) if not even or _inversions(p) % 2 == 0]


def _inversions(p: tuple[int, ...]) -> int:
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j))


@lru_cache
def _composition_table(n: int, even: bool) -> np.ndarray:
    elements = _permutations(n, even)
    number = {p: i for i, p in enumerate(elements)}
    return np.array([[number[tuple(b[i] for i in a)] for b in elements] for a in elements])


@dataclass(frozen=True)
class WordProblem(TokenTask):
    """The word problem of a group: the label at position t is the product g_1 ⋯ g_t of uniform
    elements.

    g_1 acts first.

    Attributes:
        group: The group that the elements are drawn from.
        length: Elements per sequence.
    """

    group: Group = Cyclic(2)
    length: int = 40

    @property
    def vocabulary(self) -> int:
        return self.group.order

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        words = generator.integers(self.group.order, size=(count, self.length))
        table, products = self.group.table, words.copy()
        for t in range(1, self.length):
            products[:, t] = table[products[:, t - 1], words[:, t]]
        return Batch(torch.from_numpy(words), torch.from_numpy(products))


@dataclass(frozen=True)
class ModularArithmetic(TokenTask):
    """Sums, differences and products modulo m; the label of a number is the value of the expression
    up to it.

    × binds first (the brackets-free task of Delétang et al., 2023, who ask for the last value
    only). Tokens 0 … m - 1 are numbers, then follow +, -, ×. There are (length + 1) / 2 numbers.

    Attributes:
        modulus: m.
        length: Tokens per expression, an odd number.

    Raises:
        ValueError: If `length` is even.
    """

    modulus: int = 5
    length: int = 39

    def __post_init__(self) -> None:
        if self.length % 2 == 0 or self.length < 1:
            raise ValueError(
                f"ModularArithmetic(length={self.length}): an expression has an odd number of"
                " tokens; take an odd length"
            )

    @property
    def vocabulary(self) -> int:
        return self.modulus + 3

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        inputs = np.empty((count, self.length), np.int64)
        inputs[:, 0::2] = generator.integers(self.modulus, size=(count, self.length // 2 + 1))
        inputs[:, 1::2] = self.modulus + generator.integers(3, size=(count, self.length // 2))
        labels = np.full_like(inputs, IGNORE_INDEX)
        labels[:, 0::2] = self._values(inputs[:, 0::2], inputs[:, 1::2] - self.modulus)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels))

    def _values(self, numbers: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Values of all prefixes, from the sum of the terms before the present product, and that
        product.
        """
        before, product = np.zeros(len(numbers), np.int64), numbers[:, 0]
        values = [product]
        for t in range(signs.shape[1]):
            number, sign = numbers[:, t + 1], signs[:, t]
            before = np.where(sign == 2, before, before + product) % self.modulus
            product = np.choose(sign, [number, -number, product * number]) % self.modulus
            values.append((before + product) % self.modulus)
        return np.stack(values, axis=1)


# protocols ----------------------------------------------------------------------------------------

_MESANET: Fields = {"num_hidden_layers": 2, "tie_word_embeddings": False}
_MESA = {name: {"mixers": [{"name": name, "heads": 4}]} for name in ("mesa", "mesa_signed")}


def _parity_mesanet() -> Protocol:
    return Protocol(
        train=(Segment(WordProblem(Cyclic(2), 40), None),),
        test=(Segment(WordProblem(Cyclic(2), 256), 1_000),),
        training=TrainingSettings((1e-3,), (0.03,), 256, steps=10_000, schedule=Constant()),
        backbone=Backbone(_MESANET, (128,), _MESA),
        source="MesaNet, appendix H (no code released)",
        differs=(
            "optimiser and schedule are not stated (here AdamW, constant); heads have 32 channels,"
            " where the paper has 4 of 128; every string has 40 bits, where the paper restricts"
            " them to 40"
        ),
    )


def _tracking(
    short: TokenTask, long: TokenTask, steps: int, widths: tuple[int, ...], differs: str
) -> Protocol:
    """New short examples in every batch; tested on short and long ones."""
    return Protocol(
        train=(Segment(short, None),),
        test=(Segment(short, 1_000), Segment(long, 500)),
        training=TrainingSettings(
            (1e-3, 3e-3), (0.01,), 64, steps=steps, schedule=CosineAnnealing(warmup=0.1), clip=1.0
        ),
        backbone=Backbone(_MESANET, widths, _MESA),
        source="this library",
        differs=differs,
    )


def _word(group: Group, steps: int) -> Protocol:
    differs = (
        "Merrill et al. (2024) train on all words of up to 20 elements, epoch by epoch; here every"
        " batch is new"
    )
    return _tracking(WordProblem(group, 32), WordProblem(group, 128), steps, (128,), differs)


PROTOCOLS: dict[str, Protocol] = {
    "parity-mesanet": _parity_mesanet(),
    "parity-small": _tracking(
        WordProblem(Cyclic(2), 40),
        WordProblem(Cyclic(2), 256),
        1_000,
        (32,),
        "as parity-mesanet, for seconds on a CPU",
    ),
    "word-s3": _word(Permutations(3), 5_000),
    "word-s5": _word(Permutations(5), 20_000),
    "word-a5": _word(Permutations(5, even=True), 20_000),
    "modular-sum": _word(Cyclic(5), 5_000),
    "modular-arithmetic": _tracking(
        ModularArithmetic(5, 39),
        ModularArithmetic(5, 255),
        10_000,
        (128,),
        "Delétang et al. (2023) ask for the value of the whole expression only",
    ),
}
