"""Which tokens of a text are held out to validate: ranges of it, no second copy."""

from __future__ import annotations

import numpy as np
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from fastweights.errors import DataError
from fastweights.training.data.tokenizers import bytes_of_tokens
from fastweights.training.data.tokens import Ranges, TokenText, WholeText

FRACTION = 0.9
"""What is left of a text to train on, at least."""
MANY = 20
"""As many documents are held out whole; of fewer the end of the text is."""
RUNS = 64
"""Most places of a text from which documents are held out."""
_LONGEST = 4  # tokens that a character may take


def hold_out(
    text: WholeText, most: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[Ranges, Ranges]:
    """Split a text into what is trained on and what is held out.

    A tenth is held out, and at most `most` tokens: of many documents whole ones from up to `RUNS`
    places all over the text, else the end of the text.

    Raises:
        DataError: If the text is too short, or has prompts and too few documents.
    """
    budget = min(len(text) - int(FRACTION * len(text)), most)
    held = _choose_documents(text, budget) if text.documents >= MANY else np.empty((0, 2), int)
    if not text.has_prompts and (held[:, 1] - held[:, 0]).sum() < budget / 2:
        cut = _cut(text, len(text) - budget, tokenizer)
        held = np.array([[cut, len(text)]])
    if len(held) == 0:
        raise DataError(
            f"fewer than {MANY} records cannot be split; give files for validation"
            if text.documents < MANY
            else f"no record has at most {budget} tokens and can be held out; give files for"
            " validation, or let more tokens be held out"
        )
    if held[0, 0] == 0 or held[-1, 0] == held[-1, 1]:
        raise DataError(
            f"{len(text)} tokens are too few to split into training and validation; give more"
            " text, or files for validation"
        )
    edges = np.concatenate(([0], held.ravel(), [len(text)])).reshape(-1, 2)
    rest = edges[edges[:, 0] < edges[:, 1]]
    return _ranges(text, rest), _ranges(text, held)


def thin_out(text: WholeText, length: int, most: int) -> Ranges:
    """Select at most `most` tokens, or one sequence: `length` at a time from all over the text.

    Each selected stretch is a document of its own.
    """
    there, count = len(text) // length, max(1, most // length)
    if count >= there:
        return _ranges(text, np.array([[0, len(text)]]))
    starts = np.arange(count) * there // count * length
    return Ranges(text, np.stack([starts, starts + length], 1), begins_are_targets=False)


def all_of(text: WholeText) -> Ranges:
    """Return the whole text as one range."""
    return _ranges(text, np.array([[0, len(text)]]))


def measure(text: TokenText, tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Count the tokens of a short text that a model predicts (its first one, too), and the UTF-8
    bytes that they stand for; tokens that end texts stand for none."""
    found = text.read(0, len(text))
    first = np.arange(len(text)) == 0
    predicted = ~found.begins | text.begins_are_targets | first
    if isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        size = bytes_of_tokens(tokenizer)[found.tokens[predicted]].sum()
    else:
        parts = np.split(found.tokens, np.flatnonzero(found.begins[1:]) + 1)
        size = sum(
            len(str(tokenizer.decode(part, skip_special_tokens=True)).encode()) for part in parts
        )
    return int(predicted.sum()), int(size)


def _choose_documents(text: WholeText, budget: int) -> np.ndarray:
    """Ranges ``[r 2]`` of whole documents, `budget` tokens in all at most."""
    in_budget = budget * text.documents // len(text)
    runs = max(1, min(RUNS, text.documents // MANY, in_budget // 4))
    held, left = list[tuple[int, int]](), budget
    for run in range(runs):
        place, end = ((2 * run + k) * len(text) // (2 * runs) for k in (1, 3))
        share = left - budget * (runs - run - 1) // runs
        found = _documents_from(text, place, min(end, len(text)), share)
        if found is not None:
            held.append(found)
            left -= found[1] - found[0]
    return np.array(held, dtype=np.int64).reshape(-1, 2)


def _documents_from(text: WholeText, place: int, end: int, most: int) -> tuple[int, int] | None:
    """The first documents behind `place` that have at most `most` tokens together."""
    last = [len(text)] if end == len(text) else []
    edges = np.concatenate((text.begins(place, end), last)).astype(np.int64)
    if len(edges) < 2:
        return None
    count = int(np.searchsorted(edges, edges[0] + most, "right")) - 1
    return (int(edges[0]), int(edges[count])) if count else None


def _cut(text: WholeText, place: int, tokenizer: PreTrainedTokenizerFast) -> int:
    """The first place from `place` on at which no character is cut in two."""
    for cut in range(place, min(place + _LONGEST, len(text))):
        if not str(tokenizer.decode(text[cut : cut + _LONGEST])).startswith(
            "\N{REPLACEMENT CHARACTER}"
        ):
            return cut
    return place


def _ranges(text: WholeText, ranges: np.ndarray) -> Ranges:
    return Ranges(text, ranges, text.begins_are_targets)
