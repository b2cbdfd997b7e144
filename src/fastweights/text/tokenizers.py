"""Tokenizers: how they are made, text to tokens, and tokens to text as they arrive."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.runs.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_PIECE = 1 << 15  # characters encoded at once
_BOUNDARY = re.compile(r"(?<=\S)(?=\s)")
_SEQUENCE = 4  # bytes of the longest UTF-8 character


class Tokenization(ABC):
    """A way to make a tokenizer; compared by value.

    Attributes:
        is_learnt: Whether the tokenizer depends on the training text.
    """

    is_learnt: ClassVar[bool] = True
    """Whether the tokenizer depends on the training text."""

    @abstractmethod
    def build(self, text: Iterable[str]) -> PreTrainedTokenizerFast:
        """Make the tokenizer, from the training text if it depends on one.

        Raises:
            DataError: If the tokenizer cannot be made.
        """


@dataclass(frozen=True)
class Bytes(Tokenization):
    """A tokenizer with one token per UTF-8 byte: token i is byte i."""

    is_learnt = False

    def build(self, text: Iterable[str]) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(
            models.BPE({letter: byte for byte, letter in enumerate(_letters())}, [])
        )
        return _byte_level(
            tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        )


@dataclass(frozen=True)
class BPE(Tokenization):
    """A byte-pair encoding learnt from the training text.

    It contains the 256 bytes, so that every text can be written, and ``<|endoftext|>``, which
    separates documents.

    Attributes:
        size: Number of tokens.
    """

    size: int

    def build(self, text: Iterable[str]) -> PreTrainedTokenizerFast:
        if self.size < 257:
            raise DataError(
                f"bpe:{self.size} is too small: 256 bytes and {END_OF_TEXT} need 257 tokens or more"
            )
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(
            vocab_size=self.size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=_letters(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            (piece for document in text for piece in pieces(document)), trainer
        )
        return _byte_level(tokenizer, split, eos_token=END_OF_TEXT)


@dataclass(frozen=True)
class ExistingTokenizer(Tokenization):
    """A tokenizer that exists already.

    Attributes:
        source: A local folder, or a name on the Hugging Face hub.
    """

    is_learnt = False

    source: str

    def build(self, text: Iterable[str]) -> PreTrainedTokenizerFast:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(
                f"no tokenizer at {self.source!r} (byte and bpe:N need no folder): {reason}"
            ) from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise DataError(
                f"{self.source!r} has no tokenizer.json; save it with a fast tokenizer first"
            )
        return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, documents: Iterable[str]) -> np.ndarray:
    """Tokenize all documents, with the end-of-text token between them: ``[n]`` uint16 or int32.

    A tokenizer without that token has an empty line there.
    """
    end = tokenizer.eos_token_id
    between = token_ids(tokenizer, "\n\n") if end is None else np.array([end])
    parts: list[np.ndarray] = []
    for document in documents:
        parts += [between] if parts else []
        parts.append(token_ids(tokenizer, document))
    return np.concatenate(parts).astype(np.uint16 if len(tokenizer) <= 1 << 16 else np.int32)


def pieces(document: str) -> Iterator[str]:
    """Cut a document before white space, at places that no token of byte-level BPE crosses."""
    start = 0
    while start < len(document):
        cut = _BOUNDARY.search(document, start + _PIECE)
        end = len(document) if cut is None else cut.start()
        yield document[start:end]
        start = end


class TextStream:
    """Turns tokens into text as soon as it is certain: one character's bytes may span several
    tokens.

    It remembers only a few tokens, however long the text grows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._recent: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Add a token and return the text that it made certain, which may be empty."""
        self._recent.append(token)
        text = self._decode()
        certain = len(text) - text.endswith("\N{REPLACEMENT CHARACTER}")
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        self._forget()
        return new

    def close(self) -> str:
        """Return the remaining text: a replacement character if it ends inside a character."""
        rest = self._decode()[self._shown :]
        self._recent, self._shown = [], 0
        return rest

    def _forget(self) -> None:
        if len(self._recent) < 4 * _SEQUENCE:
            return
        hidden = len(self._decode()) - self._shown
        self._recent = self._recent[-_SEQUENCE:]
        self._shown = len(self._decode()) - hidden

    def _decode(self) -> str:
        return str(
            self._tokenizer.decode(
                self._recent, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def token_ids(tokenizer: PreTrainedTokenizerFast, document: str) -> np.ndarray:
    """Tokenize one text without special tokens: ``[n]`` int32."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(
        list(pieces(document)), add_special_tokens=False
    )
    return np.concatenate([np.array(piece.ids, dtype=np.int32) for piece in encoded])


def _byte_level(
    tokenizer: Tokenizer, split: pre_tokenizers.ByteLevel, eos_token: str | None = None
) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos_token, clean_up_tokenization_spaces=False
    )


def _letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte if byte in printable else 256 + unprintable.index(byte)) for byte in range(256)
    ]
