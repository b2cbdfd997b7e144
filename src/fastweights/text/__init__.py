"""Text to tokens: sources, tokenizers, corpora of windows and packed documents."""
