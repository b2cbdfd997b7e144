"""Texts as tokens that are read by ranges: in memory, or as ranges of another text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
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


@dataclass(frozen=True, eq=False)
class Ranges(TokenText):
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

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, start: int, stop: int) -> Stretch:
        parts = list(self._read_parts(start, stop))
        return Stretch.join(parts) if parts else self.text.read(0, 0)

    def _read_parts(self, start: int, stop: int) -> Iterator[Stretch]:
        number = int(np.searchsorted(self._offsets, start, "right")) - 1
        while start < stop:
            place, end = start - int(self._offsets[number]), int(self._offsets[number + 1])
            first = int(self.ranges[number, 0]) + place
            part = self.text.read(first, first + min(stop, end) - start)
            if place == 0:
                part.begins[0] = True
            yield part
            start, number = min(stop, end), number + 1

    @cached_property
    def _offsets(self) -> np.ndarray:
        """``[r+1]``, where each range begins among the tokens of all."""
        return np.concatenate(([0], (self.ranges[:, 1] - self.ranges[:, 0]).cumsum()))


@dataclass(frozen=True, eq=False)
class Joined(TokenText):
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

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def read(self, start: int, stop: int) -> Stretch:
        parts = list(self._read_parts(start, stop))
        return Stretch.join(parts) if parts else self.texts[0].read(0, 0)

    def _read_parts(self, start: int, stop: int) -> Iterator[Stretch]:
        first = int(np.searchsorted(self._offsets, start, "right")) - 1
        for text, offset in zip(self.texts[first:], self._offsets[first:], strict=False):
            place, end = max(0, start - int(offset)), min(len(text), stop - int(offset))
            if place >= end:
                continue
            part = text.read(place, end)
            if place == 0:
                part.begins[0] = True
            yield part

    @cached_property
    def _offsets(self) -> np.ndarray:
        """``[n+1]``, where each text begins among the tokens of all."""
        return np.cumsum([0, *map(len, self.texts)])
