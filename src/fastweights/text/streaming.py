"""A text that is still being written, opened at its first blocks."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from fastweights.text.blocks import BlockedText, Journal, open_block
from fastweights.text.corpus import Corpus, Source, mix, split_corpus
from fastweights.text.index import open_shards
from fastweights.text.request import VALIDATION, StoredCollection, TextRequest
from fastweights.text.shards import Shards
from fastweights.text.shares import naming


def open_stream(
    journal: Journal, request: TextRequest, tokenizer: PreTrainedTokenizerFast
) -> Corpus:
    """Open the texts of a folder of which the first blocks are written, and all that is validated
    on.

    What is held out is a part of each text's first block, if there are no sources for it.

    Args:
        journal: The journal of the folder.
        request: What is read.
        tokenizer: The tokenizer.

    Raises:
        DataError: If the first block of a text is too short.
    """
    apart = None
    if request.validation:
        apart = open_shards(journal.folder, journal.texts, VALIDATION)
    found = {
        collection.text: _open_first_block(journal, collection, apart, request.length, tokenizer)
        for collection in request.collections
    }
    return mix(request, found)


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
