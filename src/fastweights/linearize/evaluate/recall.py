"""Recall by distance: passages of a text, repeated a known number of tokens later.

The tokens of the second copy, after the first few, can be had by looking back to the first. This
asks nothing of a model's tokenizer, and every text has such passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.linearize.convert.modes import Mode
from fastweights.linearize.evaluate.comparison import ModeComparison, compare_with_softmax
from fastweights.linearize.evaluate.logits import ReadOut
from fastweights.linearize.evaluate.share import Share, share_of
from fastweights.training.data.tokens import TokenText
from fastweights.training.loop.report import Follow, unfollowed

PASSAGE = 32
"""Tokens of a passage."""
CUE = 4
"""Tokens of the second copy from which a model may notice that it repeats; the rest is recalled."""
SEQUENCES = 32
"""Passages at every distance, at most; where all of them would be longer together than the text, as
many as its share for a distance has room for, or one."""
NEAREST, FARTHEST = 64, 2048


@dataclass(frozen=True, eq=False)
class DistanceRecall:
    """What a conversion recalls from one distance.

    Attributes:
        distance: Tokens from a token back to its twin.
        beyond_training: Whether these sequences are longer than those of the training.
        found: The comparisons on the recalled tokens, by mode.
        share: The share of what the window alone leaves open there.
    """

    distance: int
    beyond_training: bool
    found: Mapping[str, ModeComparison]
    share: Share

    def row(self) -> dict[str, Any]:
        """Return the numbers for a JSON file."""
        numbers = {
            name: {"accuracy": compared.accuracy, "nats_per_token": compared.loss.mean}
            for name, compared in self.found.items()
        }
        tokens = next(iter(self.found.values())).losses.size
        return {
            "distance": self.distance,
            "tokens": tokens,
            "beyond_training": self.beyond_training,
            **numbers,
            **self.share.row(),
        }


def distances_to(length: int) -> list[int]:
    """List the distances that are measured after a training on sequences of `length` tokens.

    They are 64, 128 and so on up to 2048, or as far as the training has looked.
    """
    farthest = max(FARTHEST, length)
    return [1 << power for power in range(NEAREST.bit_length() - 1, farthest.bit_length())]


def why_not(distance: int, positions: int | None, tokens: int, trained: int) -> str | None:
    """Return why recall from a distance cannot be measured; None where it can.

    Args:
        distance: The distance.
        positions: Positions that the model has; None for no limit.
        tokens: Tokens of the text.
        trained: Tokens of a sequence in training: longer ones are read twice at least.
    """
    takes = distance + PASSAGE
    if positions is not None and takes > positions:
        return f"the model has {positions:,} positions, and this takes {takes:,}"
    if takes > trained:
        takes *= 2
    if tokens < takes:
        return f"the validation text has {tokens:,} tokens, and this takes {takes:,}"
    return None


def choose_distances(
    trained: int, positions: int | None, tokens: int, modes: int, room: int
) -> tuple[dict[int, int], dict[int, str]]:
    """Return how many tokens are read at each distance that is measured, the nearest first, and why
    others are not.

    Args:
        trained: Tokens of a sequence in training.
        positions: Positions that the model has; None for no limit.
        tokens: Tokens of the text.
        modes: Modes of the model that read them.
        room: Tokens that all modes may read together.
    """
    distances, left = distances_to(trained), room
    # every mode reads the same tokens, and every distance has the same share of them
    most = min(tokens, room // modes) // len(distances)
    chosen, left_out = dict[int, int](), dict[int, str]()
    for distance in distances:
        takes = modes * (distance + PASSAGE)
        if why := why_not(distance, positions, tokens, trained):
            left_out[distance] = why
        elif takes > left:
            left_out[distance] = (
                f"this takes {takes:,} tokens in {modes} modes, and of {room:,}, as many as are"
                f" validated or trained on, {left:,} are left"
            )
        else:
            chosen[distance] = most
            left -= takes * sequences_at(distance, tokens, most)
    return chosen, left_out


def sequences_at(distance: int, tokens: int, most: int) -> int:
    """Return how many sequences are read at a distance, of a text of so many tokens, if they have
    no more than `most`, but for the first."""
    return min(SEQUENCES, max(1, most // (distance + PASSAGE)), 1 + (tokens - distance) // PASSAGE)


def measure_recall(
    model: Any,
    text: TokenText,
    distance: int,
    modes: Mapping[str, Mode],
    *,
    trained: int,
    most: int,
    teacher: Callable[[Mapping[str, Tensor]], ReadOut] | None = None,
    follow: Follow = unfollowed,
) -> DistanceRecall:
    """Measure what a linearized model recalls from a distance, in all of its modes.

    Args:
        model: A linearized model, with adapters or without.
        text: The text that passages are taken from, of `distance` + 32 tokens at least.
        distance: Tokens from a token back to its twin, 32 or more.
        modes: The modes by name, as `ablations` returns them.
        trained: Tokens of a sequence in training; so many are read at once, four times.
        most: Tokens that are read, at most, but for the first sequence.
        teacher: As in `compare_with_softmax`.
        follow: Told of every batch.
    """
    ids = repeated_passages(text, distance, most)
    batches = _batches(ids, max(1, 4 * trained // ids.shape[1]))
    measured = follow(batches, f"recall from {distance:,} tokens back")
    found = compare_with_softmax(model, measured, modes, teacher)
    return DistanceRecall(distance, ids.shape[1] > trained, found, share_of(found))


def repeated_passages(text: TokenText, distance: int, most: int) -> Tensor:
    """Cut sequences ``[n distance + 32]`` out of a text whose last 32 tokens are its first again.

    Args:
        text: The text, of `distance` + 32 tokens at least.
        distance: Tokens from a token to its second copy, 32 or more.
        most: Tokens of all sequences, at most, but for the first.
    """
    last = len(text) - distance
    count = sequences_at(distance, len(text), most)
    starts = np.linspace(0, last, count).astype(int)
    stretches = np.stack([text[start : start + distance] for start in starts])
    return torch.from_numpy(np.concatenate([stretches, stretches[:, :PASSAGE]], 1).astype(np.int64))


def _batches(ids: Tensor, together: int) -> list[dict[str, Tensor]]:
    """Inputs that have logits before recalled tokens alone."""
    length = ids.shape[1]
    # the cue's last token predicts the first one that is recalled
    kept = torch.arange(length - PASSAGE + CUE - 1, length)
    return [{"input_ids": batch, "logits_to_keep": kept} for batch in ids.split(together)]
