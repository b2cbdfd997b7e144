"""Tokenizers: how they are made, text to tokens, and tokens to text as they arrive."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.runs.errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""Ends a document, and begins one, as GPT-2 has it."""
PAD = "<|pad|>"
SAMPLE = 1 << 24
"""Characters of text that byte pairs are learnt from, at most."""
_PIECE = 1 << 15  # characters of a piece, and up to the next white space
_LONGEST = 1 << 20  # characters of a piece in which there is none
_BATCH = 1 << 22  # characters encoded at once, at most
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
    """A tokenizer with one token per UTF-8 byte: token i is byte i.

    Token 256 is ``<|endoftext|>``, which ends a document and begins one, 257 is ``<|pad|>``.
    """

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

    It contains the 256 bytes, so that every text can be written, ``<|endoftext|>``, which ends a
    document and begins one, and ``<|pad|>``. It is learnt from the first `SAMPLE` characters.

    Attributes:
        size: Number of tokens.
    """

    size: int

    def build(self, text: Iterable[str]) -> PreTrainedTokenizerFast:
        if self.size < 258:
            raise DataError(
                f"bpe:{self.size} is too small: 256 bytes, {END_OF_TEXT} and {PAD} need 258 tokens"
                " or more"
            )
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(
            vocab_size=self.size,
            special_tokens=[END_OF_TEXT, PAD],
            initial_alphabet=_letters(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_sample(text), trainer)
        return _byte_level(tokenizer, split)


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


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of the texts, up to `SAMPLE` characters."""
    left = SAMPLE
    for text in texts:
        for piece in pieces(text):
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return


def pieces(document: str) -> Iterator[str]:
    """Cut a document before white space, at places that no token of byte-level BPE crosses."""
    return cut((document,))


def cut(blocks: Iterable[str]) -> Iterator[str]:
    """Cut a document that comes in blocks; the same pieces as `pieces` of the whole.

    Text that has no white space for long is cut where its piece has become too long.
    """
    text = ""
    for block in blocks:
        text, start = text + block, 0
        while (end := _end_of_piece(text, start)) is not None:
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def _end_of_piece(text: str, start: int) -> int | None:
    """None if more of the text has to be seen."""
    longest = start + _LONGEST
    cut = _BOUNDARY.search(text, start + _PIECE, longest)
    return cut.start() if cut else longest if len(text) > longest else None


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
    """Tokenize one text without special tokens: ``[n]`` uint16 or int32."""
    return next(encode_texts(tokenizer, (document,)))


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Tokenize texts, in parallel and in little memory, without special tokens.

    Returns:
        Tokens ``[n]``, uint16 or int32, of each text in turn.
    """
    kind = token_type(tokenizer)
    if _is_bytes(tokenizer):
        return (np.frombuffer(text.encode(), np.uint8).astype(kind) for text in texts)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # as its file, or the last call of the tokenizer, may have set
    backend.no_truncation()
    return _encode_texts(backend, texts, kind)


def token_type(tokenizer: PreTrainedTokenizerFast) -> type[np.uint16] | type[np.int32]:
    """The smallest type of number that every token fits."""
    return np.uint16 if len(tokenizer) <= 1 << 16 else np.int32


def _encode_texts(backend: Tokenizer, texts: Iterable[str], kind: type) -> Iterator[np.ndarray]:
    counts = deque[int]()

    def cut_all() -> Iterator[str]:
        for text in texts:
            parts = list(pieces(text)) or [""]
            counts.append(len(parts))
            yield from parts

    encoded = _encode_pieces(backend, cut_all(), kind)
    for first in encoded:
        yield np.concatenate((first, *islice(encoded, counts.popleft() - 1)))


def _encode_pieces(backend: Tokenizer, parts: Iterator[str], kind: type) -> Iterator[np.ndarray]:
    for batch in _batches(parts):
        for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=kind)


def _batches(parts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of twice as many characters as the one before, up to `_BATCH`: who wants little of a
    text waits for little.
    """
    batch, size, most = list[str](), 0, _PIECE
    for part in parts:
        batch.append(part)
        size += len(part)
        if size >= most:
            yield batch
            batch, size, most = [], 0, min(2 * most, _BATCH)
    if batch:
        yield batch


def _is_bytes(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether token i is byte i, whatever its neighbours are (`Bytes`)."""
    backend = tokenizer.backend_tokenizer
    split = backend.pre_tokenizer
    return (
        backend.get_vocab_size(with_added_tokens=False) == 256
        and backend.normalizer is None
        and isinstance(split, pre_tokenizers.ByteLevel)
        and not split.add_prefix_space
        and list(map(backend.token_to_id, _letters())) == list(range(256))
    )


def _byte_level(tokenizer: Tokenizer, split: pre_tokenizers.ByteLevel) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = split  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([END_OF_TEXT, PAD])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def _letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte if byte in printable else 256 + unprintable.index(byte)) for byte in range(256)
    ]
