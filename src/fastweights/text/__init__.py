"""Text to tokens: sources, tokenizers, corpora of windows and packed documents."""

IGNORE_INDEX = -100
"""The label of a token that is not learnt (torch, transformers)."""
