"""Tokenizers: how they are made, text to tokens, and tokens to text as they arrive."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import ClassVar, TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fastweights.errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""Ends a document, and begins one, as GPT-2 has it."""
PAD = "<|pad|>"
SAMPLE = 1 << 24
"""Characters of text that byte pairs are learnt from, at most."""
_PIECE = 1 << 15  # characters of a piece, and up to the next white space
_LONGEST = 1 << 20  # characters of a piece in which there is none
_BATCH = 1 << 22  # characters encoded at once, at most
_BOUNDARY = re.compile(r"(?<=\S)(?=\s)")
_CONTEXT = 64  # characters of what stands before a piece with which it is encoded
_SEQUENCE = 4  # bytes of the longest UTF-8 character
T = TypeVar("T")


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
        tokenizer.pre_tokenizer = split
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


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest token: what embeddings need, whatever gaps there are between."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def require_embeddings(tokenizer: PreTrainedTokenizerBase, rows: int, source: str) -> None:
    """Check that a model has embeddings for every token that a text can have; padding is in none.

    Raises:
        DataError: If it does not.
    """
    pad, begin, end = (getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos"))
    padding = {pad} - {begin, end}
    last = max({*tokenizer.get_vocab().values()} - padding, default=-1)
    if last >= rows:
        raise DataError(
            f"the tokenizer for {source} has tokens up to {last:,}, the model embeddings for"
            f" {rows:,}; put the tokenizer there that the model was trained with, or give it more"
            f" embeddings by model.resize_token_embeddings({vocabulary_size(tokenizer)})"
        )


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """``[vocabulary]``, the UTF-8 bytes that each token of byte-level BPE stands for: a letter of
    its vocabulary is one, an added token is text; special tokens stand for none."""
    sizes = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    for token, number in tokenizer.get_vocab().items():
        sizes[number] = len(token)
    for number, added in tokenizer.added_tokens_decoder.items():
        sizes[number] = len(added.content.encode())
    sizes[tokenizer.all_special_ids] = 0
    return sizes


def token_type(tokenizer: PreTrainedTokenizerFast) -> type[np.uint16] | type[np.int32]:
    """The smallest type of number that every token fits."""
    return np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.int32


def token_ids(tokenizer: PreTrainedTokenizerFast, document: str) -> np.ndarray:
    """Tokenize one text without special tokens: ``[n]`` uint16 or int32."""
    return next(encode_texts(tokenizer, (document,)))


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Tokenize texts, in parallel and in little memory, without special tokens.

    Returns:
        Tokens ``[n]``, uint16 or int32, of each text in turn.
    """
    return Encoder(tokenizer).encode(("", text) for text in texts)


class Encoder:
    """Tokenizes texts, in parallel and in little memory, without special tokens.

    Attributes:
        dtype: The type of a token, uint16 or int32.
        is_bytes: Whether token i is byte i, whatever its neighbours are (`Bytes`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.dtype, self.is_bytes = token_type(tokenizer), _is_bytes(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()  # as its file, or the last call of the tokenizer, may have set
        self._backend.no_truncation()

    def encode(self, texts: Iterable[tuple[str, str]]) -> Iterator[np.ndarray]:
        """Tokenize texts of which each stands behind another, at a place where `cut` cuts.

        Args:
            texts: What stands before each, or the end of that (empty where there is nothing), and
                the text.

        Returns:
            Tokens ``[n]`` of each text in turn.
        """
        if self.is_bytes:
            yield from (np.frombuffer(t.encode(), np.uint8).astype(self.dtype) for _, t in texts)
            return
        counts = deque[int]()

        def cut_all() -> Iterator[tuple[str, str]]:
            for before, text in texts:
                parts = list(pieces(text)) or [""]
                counts.append(len(parts))
                yield from zip((before, *parts), parts, strict=False)

        encoded = self._encode_pieces(cut_all())
        for first in encoded:
            yield np.concatenate((first, *islice(encoded, counts.popleft() - 1)))

    def encode_with_places(self, texts: Iterable[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokenize texts, each at once, as the tokenizer itself does.

        Returns:
            Tokens ``[n]`` of each text in turn, and their places in it ``[n 2]``: the first
            character of each, and the one behind its last.
        """
        for batch in _batches(texts, len):
            for encoding in self._backend.encode_batch(batch, add_special_tokens=False):
                places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
                yield np.array(encoding.ids, dtype=self.dtype), _fill_places(places)

    def _encode_pieces(self, parts: Iterable[tuple[str, str]]) -> Iterator[np.ndarray]:
        encode = self._encode_behind if self._begins_texts else self._encode_alone
        for batch in _batches(parts, lambda part: len(part[1])):
            yield from (
                np.array(ids, dtype=self.dtype) for ids in encode(*zip(*batch, strict=True))
            )

    def _encode_alone(self, _: Sequence[str], texts: Sequence[str]) -> Iterator[list[int]]:
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return (encoding.ids for encoding in batch)

    def _encode_behind(self, before: Sequence[str], texts: Sequence[str]) -> Iterator[list[int]]:
        """The tokens of both texts without those of the first, unless these are others alone."""
        ends = [text[-_CONTEXT:] for text in before]
        both = [end + text for end, text in zip(ends, texts, strict=True)]
        found = (self._encode_alone((), several) for several in (ends, both, texts))
        for end, whole, alone in zip(*found, strict=True):
            yield whole[len(end) :] if end and whole[: len(end)] == end else alone

    @cached_property
    def _begins_texts(self) -> bool:
        """Whether something stands before the first token of every text, such as a space."""
        texts = ("a", " b", "\nb", "a b", "a\nb")
        a, space, line, *together = self._encode_alone((), texts)
        return [a + space, a + line] != together


def _fill_places(places: np.ndarray) -> np.ndarray:
    """Tokenizers leave white space out of places, so that a token of nothing else has none."""
    starts, ends = places.T
    empty, before = starts == ends, np.concatenate(([0], ends))[:-1]
    starts = np.where(empty, np.minimum(starts, before), starts)
    return np.stack([starts, np.where(starts == ends, ends + 1, ends)], 1)


def _batches(parts: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of twice as many characters as the one before, up to `_BATCH`: who wants little of a
    text waits for little.
    """
    batch, size, most = list[T](), 0, _PIECE
    for part in parts:
        batch.append(part)
        size += size_of(part)
        if size >= most:
            yield batch
            batch, size, most = list[T](), 0, min(2 * most, _BATCH)
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
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
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
