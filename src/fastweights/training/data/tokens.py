"""Texts as tokens that are read by ranges: in memory, or as ranges of another text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class Stretch(NamedTuple):
    """Consecutive tokens of a text.

    Attributes:
        tokens: ``[n]`` token ids.
        begins: ``[n]`` bool, whether a document begins with the token.
        response: ``[n]`` bool, whether a model should learn to write the token.
    """

    tokens: np.ndarray
    begins: np.ndarray
    response: np.ndarray

    @classmethod
    def join(cls, parts: list[Stretch]) -> Stretch:
        """Put stretches one behind the other."""
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, zip(*parts, strict=True)))


class TokenText(ABC):
    """A text as tokens; a slice of it is an array of token ids ``[n]``.

    Attributes:
        begins_are_targets: Whether the first token of a document is predicted from the document
            before, as an end-of-text token is that stands between the two.
    """

    begins_are_targets: bool

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The type of a token id, uint16 or int32."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, stop: int) -> Stretch:
        """Return tokens `start` … `stop - 1`."""

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        return self.read(start, max(start, stop)).tokens[::step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


class WholeText(TokenText):
    """A text with all of its documents, such as one can be split into parts.

    Attributes:
        documents: Number of documents.
        has_prompts: Whether some of its tokens are not for a model to write.
    """

    @property
    @abstractmethod
    def documents(self) -> int: ...

    @property
    @abstractmethod
    def has_prompts(self) -> bool: ...

    @abstractmethod
    def begins(self, start: int, stop: int) -> np.ndarray:
        """Return the places from `start` on, before `stop`, where documents begin, ascending."""


@dataclass(frozen=True, eq=False)
class Sequences(WholeText):
    """The tokens ``[n]`` of documents one after another, as arrays.

    Attributes:
        tokens: ``[n]`` token ids.
        response: ``[n]`` bool, the tokens that a model should learn to write.
        document: ``[n]``, the number of each token's document.
        begins_are_targets: Whether the first token of a document is predicted from the one before.
    """

    tokens: np.ndarray
    response: np.ndarray
    document: np.ndarray
    begins_are_targets: bool = False

    @classmethod
    def plain(cls, tokens: np.ndarray) -> Sequences:
        """Return one document, all of which is to be learnt."""
        count = len(tokens)
        return cls(tokens, np.broadcast_to(np.True_, count), np.broadcast_to(np.int32(0), count))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self._begins)

    @cached_property
    def has_prompts(self) -> bool:
        return not self.response.all()

    def read(self, start: int, stop: int) -> Stretch:
        begins = np.zeros(stop - start, dtype=bool)
        begins[self.begins(start, stop) - start] = True
        return Stretch(self.tokens[start:stop], begins, self.response[start:stop])

    def begins(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._begins, (start, stop))
        return self._begins[first:last]

    @cached_property
    def _begins(self) -> np.ndarray:
        changes = np.flatnonzero(self.document[1:] != self.document[:-1]) + 1
        return np.concatenate(([0], changes)).astype(np.int64)


class Concatenated(TokenText):
    """A text of parts, one after the other."""

    @abstractmethod
    def _sizes(self) -> Iterable[int]:
        """Number of tokens of each part."""

    @abstractmethod
    def _read_part(self, number: int, start: int, stop: int) -> Stretch:
        """Return some of the tokens of a part."""

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, start: int, stop: int) -> Stretch:
        parts = [self._read_part(*place) for place in self._places(start, stop)]
        empty = Stretch(np.empty(0, self.dtype), np.empty(0, bool), np.empty(0, bool))
        return Stretch.join(parts or [empty])

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(number, first, last) of each part that has some of these tokens."""
        number = int(np.searchsorted(self._offsets, start, "right")) - 1
        while start < stop:
            before, end = int(self._offsets[number]), int(self._offsets[number + 1])
            if start < end:
                yield number, start - before, min(stop, end) - before
            start, number = end, number + 1

    @cached_property
    def _offsets(self) -> np.ndarray:
        """``[n+1]``, where each part begins among the tokens of all."""
        return np.cumsum([0, *self._sizes()])


@dataclass(frozen=True, eq=False)
class Ranges(Concatenated):
    """Ranges of another text, one after the other; a document begins with each.

    Attributes:
        text: The other text.
        ranges: ``[r 2]``, the first token of each range, and the one behind its last.
        begins_are_targets: Whether the first token of a document is predicted from the one before.
    """

    text: TokenText
    ranges: np.ndarray
    begins_are_targets: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.text.dtype

    def _sizes(self) -> Iterable[int]:
        return self.ranges[:, 1] - self.ranges[:, 0]

    def _read_part(self, number: int, start: int, stop: int) -> Stretch:
        first = int(self.ranges[number, 0])
        return _read_document(self.text, first, first + start, first + stop)


@dataclass(frozen=True, eq=False)
class Joined(Concatenated):
    """Texts of one tokenizer one after the other; a document begins with each.

    Attributes:
        texts: The texts, of which there is at least one.
    """

    texts: tuple[TokenText, ...]

    @property
    def begins_are_targets(self) -> bool:
        return self.texts[0].begins_are_targets

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.texts[0].dtype

    def _sizes(self) -> Iterable[int]:
        return map(len, self.texts)

    def _read_part(self, number: int, start: int, stop: int) -> Stretch:
        return _read_document(self.texts[number], 0, start, stop)


def _read_document(text: TokenText, begin: int, start: int, stop: int) -> Stretch:
    """Some tokens of a text, in which a document begins at the place `begin`."""
    found = text.read(start, stop)
    if start == begin:
        found.begins[0] = True
    return found
