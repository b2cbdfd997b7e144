"""Text that must be recalled: every token's distance against the tokens and characters
themselves."""

import gzip
from itertools import islice

import numpy as np
import pytest
import torch

from fastweights.errors import DataError
from fastweights.linearize.evaluate.far_text import (
    CopiedStretch,
    FarDocument,
    far_documents,
    far_text,
    token_distances,
)
from fastweights.training.data.sources import paths
from fastweights.training.data.tokenizers import BPE, Bytes


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [gzip.decompress(paths("shakespeare")[0].read_bytes()).decode()]


@pytest.mark.parametrize("tokenization", [Bytes(), BPE(600)], ids=["bytes", "bpe"])
def test_a_token_that_must_be_recalled_stands_where_its_distance_says(texts, tokenization):
    tokenizer = tokenization.build(text[:100_000] for text in texts)
    found = far_text(tokenizer, texts, count=4, length=1024)
    assert found.tokens.shape == found.distance.shape == (4, 1024)
    place = torch.arange(1024).expand(4, 1024)
    earlier = found.tokens.gather(1, place - found.distance)
    assert torch.equal(earlier, found.tokens)
    assert (found.distance > 0).float().mean() > 0.15


def test_distances_are_near_and_far(texts):
    found = far_text(Bytes().build([]), texts, count=16, length=2048)
    counts, _ = np.histogram(found.distance, bins=[1, 256, 512, 1024, 2048])
    assert (counts > 100).all()


def test_a_stretch_is_recalled_from_where_it_was_read_last(texts):
    for document in islice(far_documents(texts, characters=4000, reach=1500), 20):
        for recall in document.recalls:
            value = document.text[recall.start : recall.stop]
            if len(value) > 20:
                assert recall.source == document.text.rfind(value, 0, recall.start)
        stretches = [(recall.start, recall.stop) for recall in document.recalls]
        assert stretches == sorted(stretches)


def test_what_is_recalled_is_announced_as_nothing_else_in_its_document(texts):
    """The 16 characters before a value, which stand before no other value, tell which it is."""
    for document in islice(far_documents(texts, characters=4000, reach=1500), 20):
        told = dict[str, str]()
        for recall in document.recalls:
            cue = document.text[: recall.start].rpartition("\n")[2].rpartition(". ")[2]
            value = document.text[recall.start : recall.stop]
            assert told.setdefault(cue, value) == value


def test_distances_of_tokens_by_hand():
    #               0123456789012345
    document = FarDocument("k = abc; k = abc", (CopiedStretch(start=12, stop=16, source=3),))
    stops = np.array([1, 3, 5, 7, 8, 10, 12, 14, 16])  # "k", " =", " a", "bc", ";", …
    assert token_distances(document, stops).tolist() == [0, 0, 0, 0, 0, 0, 0, 5, 5]


def test_the_seed_decides(texts):
    tokenizer = Bytes().build([])
    first, again, other = (
        far_text(tokenizer, texts, count=2, length=300, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.distance, again.distance)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(
        far_text(tokenizer, texts, count=1, length=300, seed=1).tokens, first.tokens[:1]
    )


@pytest.mark.parametrize(
    ("texts", "told"),
    [([], "too short"), (["a few words"], "too short"), (["word " * 2000], "different words")],
)
def test_text_that_is_too_short_or_poor_is_refused(texts, told):
    with pytest.raises(DataError, match=told):
        far_text(Bytes().build([]), texts, count=1, length=64)
