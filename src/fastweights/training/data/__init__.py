"""From text to tokens: sources, tokenizers, windows of a corpus, and packed documents."""
