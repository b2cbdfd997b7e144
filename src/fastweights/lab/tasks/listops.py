"""ListOps of the Long Range Arena (Tay et al., 2021), generated from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fastweights.lab.tasks.base import Batch, SequenceTask
from fastweights.lab.tasks.floors import Predictions
from fastweights.lab.tasks.stored import pad_rows

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
NAMES = list(OPERATORS)
PAD, UNKNOWN, END, CLOSE = 0, 1, 2, 3
SYMBOLS = ("<pad>", "<unk>", "<eos>", "X", *NAMES, *map(str, range(10)))
"""The 18 tokens: closing brackets are X, and parentheses are dropped, as in everyone's readers of
the data.
"""
FIRST_OPERATOR, FIRST_DIGIT = 4, 8
LEAF = 0.75
UNIFORM = 4096


@dataclass(frozen=True)
class ListOps(SequenceTask):
    """Evaluate nested minima, maxima, medians (rounded down) and sums modulo 10 of digits.

    The label is the value. An argument is a digit with probability 3/4, and always at `depth`;
    otherwise it is an operator with 2 … `arguments` arguments. An end token follows the tree.

    Attributes:
        shortest: Trees have more tokens than this.
        longest: Trees have fewer tokens than this.
        depth: Deepest level of the tree.
        arguments: Most arguments of an operator.
    """

    shortest: int = 500
    longest: int = 2000
    depth: int = 10
    arguments: int = 10

    @property
    def vocabulary(self) -> int:
        return len(SYMBOLS)

    @property
    def classes(self) -> int:
        return 10

    @property
    def length(self) -> int:
        return self.longest

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        trees = _Trees(generator, self)
        rows = [trees.next() for _ in range(count)]
        tokens, lengths = pad_rows([tokens for tokens, _ in rows], self.length)
        keep = np.arange(tokens.shape[1]) < lengths[:, None]
        labels = torch.tensor([value for _, value in rows])
        return Batch(torch.from_numpy(tokens.astype(np.int64)), labels, torch.from_numpy(keep))

    def guesses(self, train: Batch, test: Batch) -> Predictions:
        flat = torch.tensor([_flat_value(row) for row in test.inputs.tolist()])
        return {**super().guesses(train, test), "the first operator on all digits": flat}


def _flat_value(tokens: list[int]) -> int:
    """The first operator on all digits, however they are nested."""
    digits = [token - FIRST_DIGIT for token in tokens if token >= FIRST_DIGIT]
    operator = tokens[0] - FIRST_OPERATOR
    return OPERATORS[NAMES[operator]](digits) if 0 <= operator < len(NAMES) else digits[0]


class _Trees:
    """Accepted trees, one after the other."""

    def __init__(self, generator: np.random.Generator, task: ListOps) -> None:
        self.generator, self.task = generator, task
        self.uniform = iter(())

    def next(self) -> tuple[list[int], int]:
        """Return (tokens, value) of the next tree."""
        while True:
            tokens: list[int] = []
            value = self._grow(1, tokens)
            if self.task.shortest < len(tokens) < self.task.longest:
                return [*tokens, END], value

    def _grow(self, depth: int, tokens: list[int]) -> int:
        """Append a tree to `tokens`; its value. A tree that is already too long is left
        unfinished.
        """
        if depth == self.task.depth or self._random() >= 1 - LEAF:
            digit = int(10 * self._random())
            tokens.append(FIRST_DIGIT + digit)
            return digit
        count = 2 + int((self.task.arguments - 1) * self._random())
        operator = int(len(NAMES) * self._random())
        tokens.append(FIRST_OPERATOR + operator)
        values = [
            self._grow(depth + 1, tokens) for _ in range(count) if len(tokens) < self.task.longest
        ]
        tokens.append(CLOSE)
        return OPERATORS[NAMES[operator]](values or [0])

    def _random(self) -> float:
        number = next(self.uniform, None)
        if number is None:
            self.uniform = iter(self.generator.random(UNIFORM).tolist())
            number = next(self.uniform)
        return number
