"""MAD: mechanistic architecture design (Poli et al., 2024), six tasks in 66 settings, as
athms/mad-lab @ 0f49a45.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights.lab.tasks.base import Batch, Task, TokenTask
from fastweights.lab.tasks.floors import Predictions
from fastweights.lab.tasks.protocol import Backbone, Fields, Protocol, Segment, TrainingSettings
from fastweights.lab.tasks.sampling import BLOCK, find_repeats, sample_distinct, sort_with_columns
from fastweights.models.loss import IGNORE_INDEX, select_targets
from fastweights.models.reconstruct import FastWeightsForReconstruction
from fastweights.training.loop.schedules import Constant, CosineAnnealing


@dataclass(frozen=True)
class InContextRecall(TokenTask):
    """Recall in context: pairs of a key and its value, then a key that occurred before, whose value
    is asked for.

    A key always has the same value. The first half of the tokens are keys, the second half values,
    and `noise_tokens` more are noise: each pair but one is, with probability `noise`, two tokens of
    noise. Inputs are the first length - 1 of `length` tokens.

    Attributes:
        vocabulary: Number of keys and values together.
        length: Tokens per example.
        noise_tokens: Number of further tokens that are noise.
        noise: Probability that a pair is noise.
        known: Whether only values of keys seen before are labels (tests); otherwise every next
            token is (training).
    """

    vocabulary: int = 16
    length: int = 128
    noise_tokens: int = 0
    noise: float = 0.0
    known: bool = False

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        keys, values, noise = self._parts
        pairs, rows = self.length // 2 - 1, np.arange(count)
        drawn = generator.integers(keys, size=(count, pairs))
        meaning = keys + generator.integers(values, size=(count, keys))
        noisy = generator.random((count, pairs + 1)) < self.noise
        noisy[rows, generator.integers(pairs + 1, size=count)] = False
        noisy = noisy[:, :-1]
        noisy[noisy.all(1), 0] = False
        fillers = keys + values + generator.integers(max(noise, 1), size=(count, pairs, 2))
        probe = _one_of(generator, _present(drawn, ~noisy, keys))
        tokens, labels = recall(drawn, meaning, np.where(noisy[..., None], fillers, -1), probe)
        return _next(tokens, labels if self.known else tokens)

    @property
    def _parts(self) -> tuple[int, int, int]:
        """How many keys, values and noise tokens there are."""
        plain = self.vocabulary - self.noise_tokens
        return plain // 2, plain - plain // 2, self.noise_tokens


def recall(
    keys: np.ndarray, meaning: np.ndarray, fillers: np.ndarray, probe: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lay pairs out as (tokens, labels) ``[n 2·pairs + 2]``; labels are the values of keys seen
    before.

    Args:
        keys: ``[n pairs]``, the key of each pair.
        meaning: ``[n keys]``, the value of each key.
        fillers: ``[n pairs 2]``, noise in place of a pair; −1 where there is none.
        probe: ``[n]``, the key that is asked for at the end.
    """
    every = np.concatenate([keys, probe[:, None]], axis=1)
    noisy = np.concatenate([fillers[..., 0] >= 0, np.zeros((len(probe), 1), bool)], axis=1)
    values = np.take_along_axis(meaning, every, 1)
    known = find_repeats(np.where(noisy, meaning.shape[1] + np.arange(every.shape[1]), every))
    tokens = np.stack([every, values], axis=-1)
    tokens[:, :-1] = np.where(fillers < 0, tokens[:, :-1], fillers)
    labels = np.stack(
        [np.full_like(values, IGNORE_INDEX), np.where(known, values, IGNORE_INDEX)], axis=-1
    )
    return tokens.reshape(len(every), -1), labels.reshape(len(every), -1)


@dataclass(frozen=True)
class FuzzyRecall(TokenTask):
    """Recall in which keys and values are motifs of one to `motif` different tokens, left-padded to
    `length`.

    Keys are motifs of the first half of all tokens except the last, which pads; values are motifs
    of the second half. The pair that is asked for at the end is inserted where the sequence first
    has a random length, unless it came up before. In tests keys have `motif` tokens, and values of
    keys seen before are the labels; in training every next token is, padding included. Where the
    random length is not reached, the last pair was never shown: the reference has that too.

    Attributes:
        vocabulary: Number of different tokens.
        length: Tokens per example.
        motif: Most tokens of a motif.
        known: True for the labels of tests, False for those of training.

    Raises:
        ValueError: If half of the vocabulary is too small for a motif.
    """

    vocabulary: int = 16
    length: int = 128
    motif: int = 3
    known: bool = False

    def __post_init__(self) -> None:
        if (self.vocabulary - 1) // 2 < self.motif:
            raise ValueError(
                f"FuzzyRecall(vocabulary={self.vocabulary}, motif={self.motif}): half of the tokens"
                f" but one make up motifs; take at least {2 * self.motif + 1} tokens"
            )

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        blocks = [min(BLOCK, count - first) for first in range(0, count, BLOCK)]
        parts = [
            fuzzy(self._motifs(generator, block), self.length, self.vocabulary - 1)
            for block in blocks
        ]
        tokens, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _next(tokens, labels if self.known else tokens)

    def _motifs(self, generator: np.random.Generator, rows: int) -> Motifs:
        """More pairs than fit; the last is the one that is asked for."""
        keys = (self.vocabulary - 1) // 2
        values = self.vocabulary - 1 - keys
        shape = (rows, self.length // 2 + 1)
        key = self._motif(generator, shape, keys, self.motif if self.known else 1)
        value = self._motif(generator, shape, values, 1)
        value[value >= 0] += keys
        probe = (key[:, -1] >= 0).sum(1) + (value[:, -1] >= 0).sum(1)
        return Motifs(key, value, generator.integers(self.length - 2 * probe))

    def _motif(
        self, generator: np.random.Generator, shape: tuple[int, int], size: int, shortest: int
    ) -> np.ndarray:
        tokens = sample_distinct(generator, shape[0] * shape[1], self.motif, size).reshape(
            *shape, self.motif
        )
        lengths = generator.integers(shortest, self.motif + 1, size=(*shape, 1))
        return np.where(np.arange(self.motif) < lengths, tokens, -1)


@dataclass(frozen=True)
class Motifs:
    """Pairs of motifs in the order in which they are offered; the last column is asked for at the
    end.

    Attributes:
        keys, values: ``[n m motif]`` tokens, −1 behind the end of a shorter motif.
        place: ``[n]``, the length at which the last pair is inserted, unless its key came before.
    """

    keys: np.ndarray
    values: np.ndarray
    place: np.ndarray


def fuzzy(motifs: Motifs, length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Lay motifs out as (tokens, labels) ``[n length + 1]``; a repeated key keeps its first
    value."""
    codes = _codes(motifs.keys)
    last = codes.shape[1] - 1
    asked = codes[:, :last] == codes[:, last:]
    meaning = np.pad(
        np.where(asked, last, _first(codes[:, :last])), ((0, 0), (0, 1)), constant_values=last
    )
    pairs = np.concatenate(
        [motifs.keys, np.take_along_axis(motifs.values, meaning[..., None], 1)], axis=2
    )
    sizes = (pairs >= 0).sum(2)
    order = _order(_insertion_column(sizes[:, :last], asked, motifs.place), last)
    pairs, sizes = (
        np.take_along_axis(pairs, order[..., None], 1),
        np.take_along_axis(sizes, order, 1),
    )
    fits = sizes.cumsum(1) - sizes < length - sizes[:, -1:] - pairs.shape[2]
    known = find_repeats(np.take_along_axis(codes, order, 1))
    fits[:, -1] = known[:, -1] = True
    return _laid_out(pairs, known, fits, length + 1, pad)


def _codes(keys: np.ndarray) -> np.ndarray:
    """One number for each motif."""
    return (keys + 1) @ (keys.max() + 2) ** np.arange(keys.shape[2])


def _first(codes: np.ndarray) -> np.ndarray:
    """``[n m]``: the first column of its row with the same number."""
    numbers, columns = sort_with_columns(codes.astype(np.uint64))
    starts = np.pad(numbers[:, 1:] != numbers[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    begin = np.maximum.accumulate(np.where(starts, np.arange(codes.shape[1]), 0), axis=1)
    first = np.empty_like(columns)
    np.put_along_axis(first, columns, np.take_along_axis(columns, begin, 1), 1)
    return first


def _insertion_column(sizes: np.ndarray, asked: np.ndarray, place: np.ndarray) -> np.ndarray:
    """``[n]``: before which pair the last one is put in; behind all of them if its key came
    earlier.
    """
    before = sizes.cumsum(1) - sizes
    column = (before >= place[:, None]).argmax(1)
    earlier = asked & (np.arange(asked.shape[1]) < column[:, None])
    return np.where(earlier.any(1), asked.shape[1] + 1, column)


def _order(put: np.ndarray, last: int) -> np.ndarray:
    """``[n last + 2]``: columns in the order of the sequence, `last` being put in, and asked for at
    the end.
    """
    place = np.arange(last + 1)
    order = np.where(place == put[:, None], last, place - (place > put[:, None]))
    return np.pad(order, ((0, 0), (0, 1)), constant_values=last)


def _laid_out(
    pairs: np.ndarray, known: np.ndarray, fits: np.ndarray, length: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels) ``[n length]``: the pairs that fit, behind padding; values of known keys are
    labels.
    """
    n, _, width = pairs.shape
    scored = np.where(known[..., None] & (np.arange(width) >= width // 2), pairs, IGNORE_INDEX)
    taken = ((pairs >= 0) & fits[..., None]).reshape(n, -1)
    place = length - taken.sum(1, keepdims=True) + taken.cumsum(1) - 1
    tokens, labels = np.full((n, length), pad), np.full((n, length), IGNORE_INDEX)
    rows = np.nonzero(taken)[0]
    tokens[rows, place[taken]] = pairs.reshape(n, -1)[taken]
    labels[rows, place[taken]] = scored.reshape(n, -1)[taken]
    return tokens, labels


@dataclass(frozen=True)
class Memorization(TokenTask):
    """Memorise a fixed table: uniform keys, each followed by the last token, whose label is the
    key's value.

    The table is fixed by `seed`, in training and in tests; the default gives the reference's table.

    Attributes:
        vocabulary: Number of different tokens.
        length: Tokens per example.
        seed: Seed of the table.
    """

    vocabulary: int = 256
    length: int = 32
    seed: int = 12345

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        keys, values = self.table
        chosen = generator.integers(len(keys), size=(count, self.length // 2))
        inputs = np.stack([keys[chosen], np.full_like(chosen, self.vocabulary - 1)], axis=-1)
        labels = np.stack([np.full_like(chosen, IGNORE_INDEX), values[chosen]], axis=-1)
        return _to_batch(inputs.reshape(count, -1), labels.reshape(count, -1))

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and their values, each shuffled by `seed`."""
        generator, plain = np.random.default_rng(self.seed), self.vocabulary - 1
        keys, values = list(range(plain // 2)), list(range(plain // 2, plain))
        generator.shuffle(keys)
        generator.shuffle(values)
        return np.array(keys), np.array(values[: len(keys)])


@dataclass(frozen=True)
class Compression(TokenTask):
    """Compress a sequence: all uniform tokens are to be read again from the last hidden state.

    The last token of a sequence is one that occurs nowhere else.
    """

    vocabulary: int = 16
    length: int = 32
    kind: ClassVar[type[PreTrainedModel]] = FastWeightsForReconstruction

    @property
    def demands(self) -> Mapping[str, Any]:
        return {**super().demands, "pooling": "last"}

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        tokens = generator.integers(self.vocabulary - 1, size=(count, self.length))
        tokens[:, -1] = self.vocabulary - 1
        return _to_batch(tokens, tokens)

    def guesses(self, train: Batch, test: Batch) -> Predictions:
        """Those without the sequence: only its last token's hidden state is read."""
        return Task.guesses(self, train, test)

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return select_targets(model(batch.inputs).logits, batch.labels)[0]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return model(batch.inputs, labels=batch.labels).loss


@dataclass(frozen=True)
class SelectiveCopying(TokenTask):
    """Copy the tokens between blanks: after a token that says "copy", as many blanks have them as
    labels.

    Each blank goes before a uniformly chosen token, so that none stands behind the last token. In
    MAD `length` counts all tokens, those to copy into included.

    Attributes:
        vocabulary: Number of different tokens.
        length: Tokens per example.
        tokens: Number of tokens to copy.

    Raises:
        ValueError: If `length` has no room for the tokens and their copies.
    """

    vocabulary: int = 16
    length: int = 256
    tokens: int = 16

    def __post_init__(self) -> None:
        if self.length <= 2 * self.tokens + 1:
            raise ValueError(
                f"SelectiveCopying(length={self.length}, tokens={self.tokens}): the tokens are"
                f" there twice, with one between; take a length above {2 * self.tokens + 1}"
            )

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        tokens = generator.integers(self.vocabulary - 2, size=(count, self.tokens))
        blanks = self.length - 2 * self.tokens - 1
        return _to_batch(
            *copying(tokens, generator.integers(self.tokens, size=(count, blanks)), self.vocabulary)
        )


def copying(
    tokens: np.ndarray, before: np.ndarray, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay out (inputs, labels) for ``tokens [n m]`` with blanks before those at ``before [n
    blanks]``."""
    (n, m), blanks = tokens.shape, before.shape[1]
    counts = np.zeros((n, m), np.int64)
    np.add.at(counts, (np.arange(n)[:, None], before), 1)
    inputs = np.full((n, 2 * m + blanks + 1), vocabulary - 2)
    np.put_along_axis(inputs, counts.cumsum(1) + np.arange(m), tokens, 1)
    inputs[:, m + blanks] = vocabulary - 1
    labels = np.full_like(inputs, IGNORE_INDEX)
    labels[:, -m:] = tokens
    return inputs, labels


def _next(tokens: np.ndarray, labels: np.ndarray) -> Batch:
    """Each token is to predict what stands at the next one in `labels`."""
    return _to_batch(tokens[:, :-1], labels[:, 1:])


def _to_batch(inputs: np.ndarray, labels: np.ndarray) -> Batch:
    return Batch(
        torch.from_numpy(np.ascontiguousarray(inputs)),
        torch.from_numpy(np.ascontiguousarray(labels)),
    )


def _present(keys: np.ndarray, shown: np.ndarray, count: int) -> np.ndarray:
    """``[n count]``: which keys are shown."""
    present = np.zeros((len(keys), count + 1), bool)
    np.put_along_axis(present, np.where(shown, keys, count), True, 1)
    return present[:, :-1]


def _one_of(generator: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    """``[n]``: for every row of ``mask [n m]`` one of the columns where it is True."""
    return np.where(mask, generator.random(mask.shape), -1.0).argmax(1)


# protocols ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A MAD task at one difficulty: with the labels of training and those of tests, and so many
    training examples."""

    train: TokenTask
    test: TokenTask
    examples: int = 12_800


def _with(setting: Setting, field: str, value: float) -> Setting:
    if field == "examples":
        return replace(setting, examples=int(value))
    tasks: tuple[Any, Any] = setting.train, setting.test
    train, test = (replace(task, **{field: value}) for task in tasks)
    return replace(setting, train=train, test=test)


_FEWER: tuple[int, ...] = (6_400, 3_200, 1_600, 800)
_USUAL = {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "examples": _FEWER}
_NOISY = InContextRecall(32, noise_tokens=16, noise=0.2)
_TASKS: dict[str, tuple[Setting, Mapping[str, tuple[float, ...]]]] = {
    "recall": (Setting(InContextRecall(), InContextRecall(known=True)), _USUAL),
    "fuzzy-recall": (Setting(FuzzyRecall(), FuzzyRecall(known=True)), _USUAL),
    "noisy-recall": (
        Setting(_NOISY, replace(_NOISY, known=True)),
        {**_USUAL, "vocabulary": (48, 80, 144), "noise": (0.4, 0.6, 0.8)},
    ),
    "memorization": (
        Setting(Memorization(), Memorization(), 256),
        {"vocabulary": (512, 1024, 2048, 4096, 8192)},
    ),
    "compression": (Setting(Compression(), Compression()), {**_USUAL, "length": (64, 128, 256)}),
    "copying": (
        Setting(SelectiveCopying(), SelectiveCopying()),
        {**_USUAL, "length": (512, 1024), "tokens": (32, 64, 96)},
    ),
}

SETTINGS: dict[str, Setting] = {
    name: setting
    for task, (usual, changes) in _TASKS.items()
    for name, setting in [
        (task, usual),
        *(
            (f"{task}-{field}-{value}", _with(usual, field, value))
            for field, values in changes.items()
            for value in values
        ),
    ]
}
"""The six tasks, and each with one thing changed at a time."""

REPO = TrainingSettings(
    (1e-4, 5e-4, 1e-3), (0.0, 0.1), 128, epochs=200, schedule=Constant(), stop=0.999
)
SCHEDULED = replace(REPO, schedule=CosineAnnealing(final=1e-6))
MESANET = TrainingSettings(
    (3e-3, 1e-3, 5e-4, 1e-4),
    (0.01, 0.1),
    32,
    epochs=200,
    schedule=CosineAnnealing(warmup=750, start=1e-7, final=1e-5),
)

_BLOCKS: Fields = {"num_hidden_layers": 2}
HYENA_FILTER: Fields = {"width": 2, "bands": 1, "frequency": 1.0}
"""The filter of MAD's multi-head Hyena: sine layers of two channels, on a single frequency."""


def _repo_models(setting: Setting) -> dict[str, Fields]:
    """Models by name; Hyena's filter reaches all tokens, in heads of 16 channels."""
    hyena = {"name": "hyena", "heads": 8, "length": setting.train.length, **HYENA_FILTER}
    return {
        "softmax": {"mixers": [{"name": "softmax", "heads": 16}]},
        "gla": {"mixers": [{"name": "gla", "heads": 8}]},
        "mamba": {"mixers": [{"name": "mamba", "state": 4}]},
        "hyena": {"mixers": [hyena]},
    }


_MESANET_MODELS: dict[str, Fields] = {
    **{name: {"mixers": [{"name": name, "heads": 8}]} for name in ("softmax", "mesa")},
    **{
        f"mesanet-{rule}": {"mixers": [{"name": "mesanet", "heads": 8, "rule": rule}]}
        for rule in ("mamba2", "gla", "deltanet", "gated_deltanet", "mlstm")
    },
}
_REPO = (
    "athms/mad-lab @ 0f49a45: macro accuracy of the last epoch, best of the grid for each setting,"
    " mean over settings; numbers from before December 2024 (MetaLA's) had other initial weights"
    " and always copied 16 tokens; its Hyena ties projections in four groups, which ours does not"
)
_VERSIONS: dict[str, tuple[TrainingSettings, Callable[[Setting], dict[str, Fields]], str]] = {
    "repo": (
        REPO,
        _repo_models,
        f"{_REPO}; the learning rate never changes, as the code's schedule is never applied",
    ),
    "scheduled": (
        SCHEDULED,
        _repo_models,
        f"{_REPO}; with the cosine that the code means to apply",
    ),
    "mesanet": (
        MESANET,
        lambda _: _MESANET_MODELS,
        "MesaNet, Table 5, said there to be MAD's own, which it is not",
    ),
}

PROTOCOLS: dict[str, Protocol] = {
    f"mad-{version}-{name}": Protocol(
        train=(Segment(setting.train, setting.examples),),
        test=(Segment(setting.test, 1_280),),
        training=training,
        backbone=Backbone(_BLOCKS, (128,), contenders(setting)),
        source="MAD" if version != "mesanet" else "MesaNet, Table 1",
        differs=differs,
    )
    for version, (training, contenders, differs) in _VERSIONS.items()
    for name, setting in SETTINGS.items()
}

_ORDER = ("compression", "fuzzy-recall", "recall", "memorization", "noisy-recall", "copying")
METALA_A6: dict[str, dict[str, float]] = {
    model: dict(zip(_ORDER, figures, strict=True))
    for model, figures in {
        "hyena": (47.79, 18.01, 97.46, 89.48, 98.74, 90.81),
        "gla": (37.70, 12.45, 91.58, 57.05, 92.58, 88.63),
        "mamba": (43.95, 9.60, 87.92, 89.45, 90.91, 81.79),
        "metala": (45.55, 15.18, 99.87, 85.83, 99.73, 97.71),
    }.items()
}
"""Accuracies in per cent, by model and task, means over a task's settings (MetaLA, Table A6)."""
