"""Measuring language models: loss by position, multiple choice, recall."""
