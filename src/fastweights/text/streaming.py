"""A text that is still being written, opened at its first blocks."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from fastweights.text.blocks import BlockedText, Journal, open_block
from fastweights.text.corpus import Corpus, Source, mix, split_corpus
from fastweights.text.index import open_shards
from fastweights.text.request import VALIDATION, Sources, StoredCollection, naming
from fastweights.text.shards import Shards


def open_stream(
    journal: Journal, sources: Sources, length: int, tokenizer: PreTrainedTokenizerFast
) -> Corpus:
    """Open the texts of a folder of which the first blocks are written, and all that is validated
    on.

    What is held out is a part of each text's first block, if there are no sources for it.

    Args:
        journal: The journal of the folder.
        sources: What is read.
        length: Tokens per sequence.
        tokenizer: The tokenizer.

    Raises:
        DataError: If the first block of a text is too short.
    """
    apart = None
    if sources.validation:
        apart = open_shards(journal.folder, journal.texts, VALIDATION)
    found = {
        collection.text: _open_first_block(journal, collection, apart, length, tokenizer)
        for collection in sources.collections
    }
    return mix(sources, found)


def _open_first_block(
    journal: Journal,
    collection: StoredCollection,
    apart: Shards | None,
    length: int,
    tokenizer: PreTrainedTokenizerFast,
) -> Corpus:
    block = open_block(journal, collection.text, 0)
    with naming(collection.name):
        corpus = split_corpus(tokenizer, block, block.bytes, apart, collection.held_out, length)
    text = BlockedText(collection.text, journal, corpus.train)
    return replace(corpus, sources=(Source("", 1, text),))
