"""Training language models on text."""
