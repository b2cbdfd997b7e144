"""Texts of any size to tokens: the same as one text at once, in batches, with documents' ends."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.errors import DataError
from fastweights.train import HuggingFace
from fastweights.training.data import tokenizers
from fastweights.training.data.corpus import tokenize_sources
from fastweights.training.data.holdout import measure
from fastweights.training.data.tokenizers import (
    BPE,
    Bytes,
    encode_texts,
    require_embeddings,
    vocabulary_size,
)
from fastweights.training.data.tokens import Sequences

TEXT = "Früher war alles besser, sagte sie. 😀 "
TOKENIZERS = {"byte": Bytes().build(()), "bpe": BPE(400).build([TEXT * 50])}


def bytes_alone() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes, without special tokens."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({x: n for n, x in enumerate(tokenizers._letters())}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_survive_the_disk(tmp_path: Path, name: str) -> None:
    TOKENIZERS[name].save_pretrained(tmp_path)
    for tokenizer in (TOKENIZERS[name], AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
        assert tokenizer.pad_token == "<|pad|>"
        assert tokenizer("").input_ids == []
        assert tokenizer("a<|endoftext|>b").input_ids.count(tokenizer.eos_token_id) == 1
        batch = tokenizer(["a", "bcd"], padding=True)
        assert batch.input_ids[0][1:] == [tokenizer.pad_token_id] * 2
        assert batch.attention_mask[0] == [1, 0, 0]


def test_bytes_are_bytes() -> None:
    tokenizer = TOKENIZERS["byte"]
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer))
    assert ids == (256, 256, 257, 258)
    (found,) = encode_texts(tokenizer, [TEXT])
    assert bytes(found.tolist()).decode() == TEXT
    assert tokenizer(TEXT).input_ids == found.tolist()


@pytest.mark.parametrize("size", [258, 280])
def test_special_tokens_are_within_the_vocabulary(size: int) -> None:
    tokenizer = BPE(size).build([TEXT * 50])
    assert len(tokenizer) == size
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


def test_a_tokenizer_may_have_no_special_tokens(tmp_path: Path) -> None:
    bytes_alone().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 256
    assert [bytes(x.tolist()).decode() for x in encode_texts(tokenizer, [TEXT, ""])] == [TEXT, ""]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    tokens, size = tokenize_sources([str(tmp_path / "a.jsonl")], tokenizer)
    assert (bytes(tokens.tolist()), size.bytes) == (b"a\n\nb", 2)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("batch", [1, 50, 1 << 22])
def test_every_text_has_its_own_tokens(monkeypatch, name: str, batch: int) -> None:
    monkeypatch.setattr(tokenizers, "_BATCH", batch)
    monkeypatch.setattr(tokenizers, "_PIECE", 10)
    texts = [TEXT, "", "a", TEXT * 30, "", "x" * 100]
    found = list(encode_texts(TOKENIZERS[name], texts))
    assert all(tokens.dtype == np.uint16 for tokens in found)
    for text, tokens in zip(texts, found, strict=True):
        whole = TOKENIZERS[name].backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert tokens.tolist() == whole


def test_texts_are_neither_padded_nor_cut_off() -> None:
    """Whatever the tokenizer did before, or its file says."""
    tokenizer = BPE(400).build([TEXT * 50])
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert [len(tokens) for tokens in encode_texts(tokenizer, ["a", "a b c d e", ""])] == [1, 9, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_stream_takes_little_memory(name: str, monkeypatch) -> None:
    """Python's share of it: 6 MiB of text in pieces, and 128 KiB of them in a batch."""
    monkeypatch.setattr(tokenizers, "_BATCH", 1 << 17)
    piece = TEXT * 100
    tracemalloc.start()
    texts = ("".join((piece, str(n))) for n in range((6 << 20) // len(piece)))
    total = sum(len(tokens) for tokens in encode_texts(TOKENIZERS[name], texts))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 1 << 17
    assert peak < 2 << 20


def test_reading_stops_when_a_consumer_has_enough() -> None:
    read: list[str] = []

    def texts() -> Iterator[str]:
        while True:
            read.append(TEXT)
            yield TEXT

    next(encode_texts(TOKENIZERS["bpe"], texts()))
    assert sum(map(len, read)) < 2 * tokenizers._PIECE


def test_byte_pairs_are_learnt_from_a_sample(monkeypatch) -> None:
    monkeypatch.setattr(tokenizers, "SAMPLE", 10_000)
    read: list[str] = []

    def texts() -> Iterator[str]:
        while True:
            read.append(TEXT)
            yield TEXT

    learnt = BPE(300).build(texts())
    assert sum(map(len, read)) < 10_000 + len(TEXT)
    same = BPE(300).build([*read, "another text " * 5000])
    assert learnt.get_vocab() == same.get_vocab()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("most", [1, 7, 100, 5000])
def test_a_part_of_a_text_has_its_own_size(tmp_path: Path, name: str, most: int) -> None:
    """Bytes are those that the tokens read stand for, and no more."""
    (tmp_path / "a.txt").write_text(TEXT * 5)
    (tmp_path / "b.txt").write_text(TEXT * 50)
    tokenizer = TOKENIZERS[name]
    whole, _ = tokenize_sources([str(tmp_path)], tokenizer)
    tokens, size = tokenize_sources([str(tmp_path)], tokenizer, most=most)
    assert tokens.tolist() == whole[:most].tolist()
    assert size.tokens == len(tokens) == min(most, len(whole))
    text = [token for token in tokens.tolist() if token != tokenizer.eos_token_id]
    assert size.bytes == sum(len(tokenizer.convert_ids_to_tokens(token)) for token in text)


def with_far_token() -> PreTrainedTokenizerFast:
    """The largest number of a token is 1000, of fewer than 300 tokens."""
    content = json.loads(BPE(300).build([TEXT]).backend_tokenizer.to_str())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 1000
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<far>")


def test_added_tokens_count_by_their_bytes() -> None:
    tokenizer, text = BPE(300).build([TEXT]), "Früher 日本, émoji und <b>. " * 3
    tokenizer.add_tokens(["日本", "émoji", "<b>"])
    ids = tokenizers.token_ids(tokenizer, text)
    assert measure(Sequences.plain(ids), tokenizer) == (len(ids), len(text.encode()))


def test_numbers_of_tokens_may_have_gaps() -> None:
    tokenizer = with_far_token()
    assert len(tokenizer) < 300
    assert vocabulary_size(tokenizer) == 1001
    ids = np.append(tokenizers.token_ids(tokenizer, TEXT), np.uint16(1000))
    assert measure(Sequences.plain(ids), tokenizer)[1] == len(TEXT.encode())
    assert (
        HuggingFace("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 1})
        .build(tokenizer)
        .config.vocab_size
        == 1001
    )


def test_embeddings_for_all_but_padding_are_asked_for() -> None:
    tokenizer = Bytes().build(())
    require_embeddings(tokenizer, 257, "m")
    require_embeddings(tokenizer, 10_000, "m")
    message = r"m has tokens up to 256, the model embeddings for 256; .*resize_token_embeddings"
    with pytest.raises(DataError, match=message):
        require_embeddings(tokenizer, 256, "m")
    with pytest.raises(DataError, match="up to 1,000, the model embeddings for 300"):
        require_embeddings(with_far_token(), 300, "m")


def test_no_more_is_read_than_needed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "enough of it"}\n' * 10_000 + "damage")
    tokens, _ = tokenize_sources([str(tmp_path / "a.jsonl")], TOKENIZERS["byte"], most=50)
    assert len(tokens) == 50
