"""Tasks whose examples are stored in files: rows of tokens with labels, drawn without
replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from fastweights.lab.tasks.base import Batch, SequenceTask
from fastweights.models import FastWeightsForSequencePairClassification


@dataclass(frozen=True, eq=False)
class Rows:
    """Labelled rows of tokens.

    Attributes:
        tokens: ``[n t]`` or ``[n 2 t]``, of any integer dtype.
        labels: ``[n]`` classes.
        lengths: ``[n]`` or ``[n 2]``, tokens of each row that are not padding; None for all.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, rows: slice | np.ndarray) -> Rows:
        """Return the chosen rows."""
        return Rows(
            self.tokens[rows],
            self.labels[rows],
            None if self.lengths is None else self.lengths[rows],
        )

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        """Draw `count` different rows in random order, cut to the longest of them.

        Raises:
            ValueError: If there are fewer than `count` rows.
        """
        if count > len(self):
            raise ValueError(
                f"{count} different examples are asked for; the files have only {len(self)}"
            )
        chosen = self.part(generator.permutation(len(self))[:count])
        tokens, labels = (
            torch.from_numpy(chosen.tokens.astype(np.int64)),
            torch.from_numpy(chosen.labels.astype(np.int64)),
        )
        if chosen.lengths is None:
            return Batch(tokens, labels)
        longest = int(chosen.lengths.max(initial=1))
        keep = torch.from_numpy(np.arange(longest) < chosen.lengths[..., None])
        return Batch(tokens[..., :longest], labels, keep)


@dataclass(frozen=True, eq=False)
class StoredSequences(SequenceTask):
    """A classification task of stored sequences.

    Attributes:
        rows: The sequences and their classes.
        vocabulary: Number of different tokens.
        classes: Number of classes.
    """

    rows: Rows
    vocabulary: int = 256
    classes: int = 2

    @property
    def length(self) -> int:
        return self.rows.tokens.shape[-1]

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        return self.rows.draw(generator, count)


@dataclass(frozen=True, eq=False)
class StoredPairs(StoredSequences):
    """A classification task of stored pairs of sequences."""

    kind: ClassVar[type[PreTrainedModel]] = FastWeightsForSequencePairClassification


def pad_rows(texts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad texts of ids below 2¹⁶ with 0, and cut them after `length`: (tokens ``[n t]``, lengths
    ``[n]``)."""
    lengths = np.array([min(len(text), length) for text in texts])
    tokens = np.zeros((len(texts), int(lengths.max(initial=1))), np.uint16)
    for row, text, size in zip(tokens, texts, lengths, strict=True):
        row[:size] = text[:size]
    return tokens, lengths
