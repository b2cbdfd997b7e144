"""From text to tokens: sources, tokenizers, windows of a corpus, and packed documents."""

IGNORE_INDEX = -100
"""The label of a token that is not learnt (torch, transformers)."""
