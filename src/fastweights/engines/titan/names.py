"""The names of weights in torchtitan's checkpoints and in our folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Weight = TypeVar("Weight")

PREFIX = "language_model."
"""Where torchtitan's model holds ours."""
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def to_folder_names(weights: Mapping[str, Weight], *, tied: bool) -> dict[str, Weight]:
    """Rename torchtitan's weights as our folders have them.

    Args:
        weights: By their names in torchtitan; others, such as an optimiser's, are left out.
        tied: Whether the head is the embeddings, which a folder holds once.
    """
    named = {
        name.removeprefix(PREFIX): weight
        for name, weight in weights.items()
        if name.startswith(PREFIX)
    }
    if tied:
        named.pop(HEAD, None)
    return named


def from_folder_names(weights: Mapping[str, Weight], *, tied: bool) -> dict[str, Weight]:
    """Rename a folder's weights as torchtitan has them.

    Args:
        weights: By their names in a folder of ours.
        tied: Whether the head is the embeddings, which torchtitan names twice.
    """
    whole = {**weights, HEAD: weights[EMBEDDINGS]} if tied else weights
    return {PREFIX + name: weight for name, weight in whole.items()}
