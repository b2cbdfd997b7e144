"""Training: the loop, the data, and language models."""
