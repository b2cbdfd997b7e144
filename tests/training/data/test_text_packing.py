"""How documents stand in a stream of tokens, and that models keep them apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loss import IGNORE_INDEX
from fastweights.training.data.documents import Stream
from fastweights.training.data.packing import (
    encode_documents,
    framing_of_each,
    framing_of_stream,
    gather,
)
from fastweights.training.data.sources import TextPiece
from fastweights.training.data.tokenizers import Bytes
from fastweights.training.data.tokens import Sequences

END = 256
TEXTS = ("ab", "", "cde", "f")


def packed(tokenizer, framing) -> Sequences:
    documents = (iter([TextPiece(text, True)]) for text in TEXTS)
    return gather(encode_documents(tokenizer, documents, framing), framing)[0]


def with_begin_token():
    """A tokenizer that puts a begin token before every text, as Llama's does."""
    tokenizer = Bytes().build(())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END)]
    )
    return tokenizer


def test_one_end_of_text_stands_between_documents_and_is_a_target():
    tokenizer = Bytes().build(())
    text = packed(tokenizer, framing_of_stream(tokenizer))
    assert text.tokens.tolist() == [*b"ab", END, *b"cde", END, *b"f"]
    batch = Stream(text, len(text), 0).batch(0, 1)
    assert batch["labels"].tolist() == [text.tokens.tolist()]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert "position_ids" not in Stream(text, len(text), 0, boundaries=False).batch(0, 1)


def test_a_begin_token_is_no_target():
    tokenizer = with_begin_token()
    text = packed(tokenizer, framing_of_stream(tokenizer))
    assert text.tokens.tolist() == [END, *b"ab", END, END, *b"cde", END, END, *b"f", END]
    assert framing_of_stream(tokenizer) == framing_of_each(tokenizer)
    batch = Stream(text, len(text), 0, boundaries=False).batch(0, 1)
    masked = (batch["labels"] == IGNORE_INDEX).nonzero()[:, 1].tolist()
    assert masked == [0, 4, 9]


def test_without_an_end_of_text_an_empty_line_stands_between():
    tokenizer = Bytes().build(())
    tokenizer.eos_token = None
    text = packed(tokenizer, framing_of_stream(tokenizer))
    assert bytes(text.tokens.tolist()) == b"ab\n\ncde\n\nf"
    assert text.begins(0, len(text)).tolist() == [0, 3, 8]


def test_pieces_that_are_skipped_are_not_encoded_again():
    tokenizer = Bytes().build(())
    framing = framing_of_stream(tokenizer)
    read = lambda skip: [  # noqa: E731
        [run.tokens.tolist() for run in part.runs]
        for part in encode_documents(
            tokenizer, (iter([TextPiece(t, True)]) for t in TEXTS), framing, skip
        )
    ]
    assert [read(skip) for skip in (1, 2, 3)] == [read(0)[skip:] for skip in (1, 2, 3)]


@pytest.mark.parametrize("mixer", ["metala", "softmax", "gated_deltanet"])
def test_documents_together_predict_what_each_does_alone(mixer):
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, mixers=[{"name": mixer}]
    )
    model, generator = FastWeightsForCausalLM(config).eval(), np.random.default_rng(0)
    text = Sequences(generator.integers(0, 40, 30), np.ones(30, bool), np.arange(30) // 10)
    batch = Stream(text, 30, 0).batch(0, 1)
    with torch.no_grad():
        together = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
        for first in (0, 10, 20):
            alone = model(batch["input_ids"][:, first : first + 10]).logits
            torch.testing.assert_close(together[:, first : first + 10], alone, rtol=1e-4, atol=1e-5)
