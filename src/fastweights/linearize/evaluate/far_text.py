"""Text that cannot be predicted without what stands far back, and how far back it stands.

Real text is interrupted by paragraphs that come again, quotations and who said them, names and
their numbers, lists of keys and values, and code that defines what it uses later. Where one comes
again, all but the words that announce it are a copy, which a model can only recall.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_from
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.errors import DataError
from fastweights.ranges import POSITIVE_INTEGER
from fastweights.training.data.packing import framing_of_each

NEAREST = 16
"""Characters between a thing and its copy, at least."""
_AGAIN = 0.7  # probability that what was recalled is recalled once more
_PLANTED = 0.7  # probability that a thing is planted where nothing is due; otherwise text goes on
_SAMPLE = 1 << 16  # characters by which a tokenizer's tokens are measured
_VOCABULARY = 1 << 20  # characters that names and keys are taken from


@dataclass(frozen=True)
class CopiedStretch:
    """A stretch of a text that repeats what stands earlier in it.

    Attributes:
        start: Number of its first character.
        stop: Number of the character after its last.
        source: Number of the character that the first one repeats, where it was read last.
    """

    start: int
    stop: int
    source: int


@dataclass(frozen=True)
class FarDocument:
    """A text, and what in it must be recalled.

    Attributes:
        text: The text.
        recalls: The stretches that repeat earlier ones, in their order.
    """

    text: str
    recalls: tuple[CopiedStretch, ...]


@dataclass(frozen=True, eq=False)
class FarText:
    """Sequences of tokens, and from how far back each token can be recalled.

    Attributes:
        tokens: ``[n t]`` int64.
        distance: ``[n t]`` int64, how many tokens before a token the one stands that it repeats; 0
            where nothing must be recalled. Whoever predicts token i from those before it attends to
            what follows token i - 1 - distance.
    """

    tokens: Tensor
    distance: Tensor


@dataclass(frozen=True)
class _Item:
    """What is told once and recalled later: `cue` announces it as `head` did, `value` is copied."""

    head: str
    cue: str
    value: str
    end: str


def far_text(
    tokenizer: Any, texts: Sequence[str], *, count: int, length: int, seed: int = 0
) -> FarText:
    """Make sequences with copies from a few tokens back up to `length`, each a document of its own.

    Distances are spread evenly over their logarithm, as far as a sequence has room for them.

    Args:
        tokenizer: A fast tokenizer of transformers; the token that it puts before every text, if
            there is one, begins each sequence.
        texts: Real text that the copies are set in.
        count: Number of sequences n.
        length: Tokens per sequence t.
        seed: Seed of all choices; the same arguments give the same sequences.

    Raises:
        DataError: If `texts` are too short, or the tokenizer does not tell where its tokens stand.
    """
    POSITIVE_INTEGER.require(count=count, length=length)
    material = _Material(tuple(texts))
    if not tokenizer.is_fast:
        raise DataError(
            f"a {type(tokenizer).__name__} does not tell which characters its tokens are; take a"
            " fast tokenizer, which is read from a tokenizer.json"
        )
    sample = material.texts[0][:_SAMPLE]
    size = len(sample) / len(tokenizer(sample, add_special_tokens=False)["input_ids"])
    rows = [
        _row(tokenizer, material, np.random.default_rng([seed, row]), length, size)
        for row in range(count)
    ]
    tokens, distances = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
    return FarText(tokens, distances)


def far_documents(
    texts: Sequence[str], *, characters: int, reach: int, seed: int = 0
) -> Iterator[FarDocument]:
    """Write documents without end, such as a model can be trained on.

    Args:
        texts: Real text that the copies are set in.
        characters: Least length of a document.
        reach: Characters between a thing and its copy, at most and about.
        seed: Seed of all choices; the same arguments give the same documents.

    Raises:
        DataError: If `texts` are too short.
    """
    POSITIVE_INTEGER.require(characters=characters, reach=reach)
    material = _Material(tuple(texts))
    for number in count_from():
        generator = np.random.default_rng([seed, number])
        yield _DocumentWriter(material, generator, max(reach, 2 * NEAREST)).write(characters)


def token_distances(document: FarDocument, stops: np.ndarray) -> np.ndarray:
    """Compute ``[t]`` int64, how many tokens back each token of a document can be recalled from.

    A token belongs to the stretch that its last character lies in.

    Args:
        document: The document.
        stops: ``[t]``, the number of the character after each token, ascending.
    """
    distance = np.zeros(len(stops), np.int64)
    last = stops - 1
    for recall in document.recalls:
        first, end = np.searchsorted(last, (recall.start, recall.stop))
        # what their last characters repeat, and how many tokens stop ahead of that
        sources = last[first:end] - recall.start + recall.source
        distance[first:end] = np.arange(first, end) - np.searchsorted(stops, sources, side="right")
    return distance


def _row(
    tokenizer: Any, material: _Material, generator: np.random.Generator, length: int, size: float
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and distances ``[length]`` of one document; a token has about `size` characters."""
    reach = max(int(size * length), 2 * NEAREST)
    document = _DocumentWriter(material, generator, reach).write(int(2 * size * length) + 64)
    encoded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
    stops = np.array([stop for _, stop in encoded["offset_mapping"]])
    begin = framing_of_each(tokenizer).before
    ids = np.array([*begin, *encoded["input_ids"]], dtype=np.int64)
    distance = np.pad(token_distances(document, stops), (len(begin), 0))
    return ids[:length], distance[:length]


@dataclass(frozen=True)
class _Material:
    """Real text, and the words in it that serve as names, keys and values."""

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        shortest = 1 << 12
        if not self.texts or min(map(len, self.texts)) < shortest:
            raise DataError(
                "the text that copies are to be set in is too short; give texts of at least"
                f" {shortest:,} characters each"
            )
        if len(self.words) < 100:
            raise DataError(
                f"the text that copies are to be set in has {len(self.words)} different words of 4"
                " to 7 letters, too few for names and keys; give longer texts"
            )

    @cached_property
    def words(self) -> list[str]:
        sample = "".join(self.texts)[:_VOCABULARY].lower().split()
        return sorted(
            {word for word in sample if 4 <= len(word) <= 7 and word.isascii() and word.isalpha()}
        )


class _MaterialReader:
    """Draws what a document is made of, no word or number twice."""

    def __init__(self, material: _Material, generator: np.random.Generator) -> None:
        self.generator, self.words = generator, material.words
        text = material.texts[generator.integers(len(material.texts))]
        start = int(generator.integers(len(text)))
        self.text, self.place = text, text.find(" ", start) + 1
        self.used = set[str]()

    def prose(self, least: int, most: int) -> str:
        """The real text goes on, for some whole words on one line."""
        wanted = int(self.generator.integers(least, most))
        if self.place + 2 * most > len(self.text):
            self.place = 0
        found = self.text[self.place : self.place + wanted].rpartition(" ")[0]
        found = found or self.text[self.place : self.place + wanted]
        self.place += len(found) + 1
        return " ".join(found.split())

    def word(self) -> str:
        return self._new(lambda: self.words[self.generator.integers(len(self.words))])

    def number(self) -> str:
        return self._new(lambda: str(self.generator.integers(100, 10_000)))

    def _new(self, draw: Callable[[], str]) -> str:
        found = draw()
        while found in self.used:
            found = draw()
        self.used.add(found)
        return found


def _paragraph(reader: _MaterialReader) -> list[_Item]:
    words = reader.prose(80, 280).split(" ")
    head = "\n" + " ".join(words[:4])
    return [_Item(head, head, "".join(f" {word}" for word in words[4:]), "\n")]


def _quotation(reader: _MaterialReader) -> list[_Item]:
    name, words = reader.word().title(), reader.prose(30, 120)
    return [_Item(f"\n{name} said:", f"\n{name} repeated:", f" {words}", "\n")]


def _numbers(reader: _MaterialReader) -> list[_Item]:
    names = [f" The number of {reader.word().title()} is" for _ in range(_some(reader, 1, 4))]
    return [_Item(name, name, f" {reader.number()}", ".") for name in names]


def _pairs(reader: _MaterialReader) -> list[_Item]:
    keys = [f"\n- {reader.word()}:" for _ in range(_some(reader, 3, 8))]
    return [_Item(key, key, f" {reader.word()}", "") for key in keys]


def _code(reader: _MaterialReader) -> list[_Item]:
    names = [reader.word() for _ in range(_some(reader, 2, 6))]
    return [
        _Item(f"\nlet {name} =", f"\nassert {name} ==", f" {reader.number()}", ";")
        for name in names
    ]


_KINDS = (_paragraph, _paragraph, _quotation, _numbers, _pairs, _code)


def _some(reader: _MaterialReader, least: int, most: int) -> int:
    return int(reader.generator.integers(least, most + 1))


class _DocumentWriter:
    """Writes one document, from left to right."""

    def __init__(self, material: _Material, generator: np.random.Generator, reach: int) -> None:
        self.reader = _MaterialReader(material, generator)
        self.generator, self.reach = generator, reach
        self.parts, self.length = list[str](), 0
        self.recalls = list[CopiedStretch]()
        self.due = list[tuple[int, int, list[tuple[_Item, int]]]]()
        self.planted = 0

    def write(self, characters: int) -> FarDocument:
        while self.length < characters:
            if self.due and self.due[0][0] <= self.length:
                self._recall(heapq.heappop(self.due)[2])
            elif self.generator.random() < _PLANTED:
                self._plant(_KINDS[self.generator.integers(len(_KINDS))](self.reader))
            else:
                self._add(" " + self.reader.prose(40, 160))
        return FarDocument("".join(self.parts), tuple(self.recalls))

    def _plant(self, items: list[_Item]) -> None:
        self._expect([(item, self._tell(item.head, item)) for item in items])

    def _recall(self, told: list[tuple[_Item, int]]) -> None:
        order = self.generator.permutation(len(told))
        again = [(told[i][0], self._copy(*told[i])) for i in order]
        if self.generator.random() < _AGAIN:
            self._expect(again)

    def _copy(self, item: _Item, source: int) -> int:
        start = self._tell(item.cue, item)
        self.recalls.append(CopiedStretch(start, start + len(item.value), source))
        return start

    def _tell(self, head: str, item: _Item) -> int:
        """Where the value begins."""
        self._add(head)
        start = self.length
        self._add(item.value + item.end)
        return start

    def _expect(self, told: list[tuple[_Item, int]]) -> None:
        # even over the logarithm; a count breaks ties in the heap, whose items have no order
        gap = np.exp(self.generator.uniform(np.log(NEAREST), np.log(self.reach)))
        self.planted += 1
        heapq.heappush(self.due, (self.length + int(gap), self.planted, told))

    def _add(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)
