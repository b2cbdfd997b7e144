"""Evaluations of language models: likelihoods, multiple choice and recall from published files."""
