"""What predictors reach that make next to nothing of a sequence: the floors of a task.

A model on one of them has not begun to learn what the task is about, however far it is from chance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fastweights.models.loss import IGNORE_INDEX

LONGEST = 5
"""Tokens of the longest n-gram."""

Predictions = Mapping[str, Tensor]
"""Predicted labels ``[n']`` by the name of what predicts them."""


def most_frequent_label(train: Tensor, count: int) -> Tensor:
    """Predict the most frequent of the labels ``train [n]``, `count` times."""
    return torch.bincount(train).argmax().expand(count)


def label_seen_most(train: Tensor, test: tuple[Tensor, Tensor]) -> Tensor:
    """Predict the possible label that the sequence has had most often so far, ``[n']``.

    It is the plateau of models that know which labels a sequence has, and not which one is asked
    for.

    Args:
        train: Labels ``[n]``: those that occur are possible.
        test: Tokens and labels ``[n t]``.
    """
    possible, default = set(train.tolist()), int(torch.bincount(train).argmax())
    found = []
    for tokens, labels in zip(*(x.tolist() for x in test), strict=True):
        seen = Counter[int]()
        for token, label in zip(tokens, labels, strict=True):
            if token in possible:
                seen[token] += 1
            if label != IGNORE_INDEX:
                found.append(seen.most_common(1)[0][0] if seen else default)
    return torch.tensor(found)


def n_grams_of_sequence(
    test: tuple[Tensor, Tensor], unseen: Tensor, longest: int = LONGEST
) -> Predictions:
    """Predict what has most often followed the last tokens earlier in the same sequence.

    Args:
        test: Tokens and labels ``[n t]``.
        unseen: Predictions ``[n']`` for tokens that the sequence has not had before.
        longest: Tokens of the longest context; one that is new is cut at its far end.

    Returns:
        Predictions ``[n']`` of each order.
    """
    found: dict[int, list[int]] = {order: [] for order in range(1, longest + 1)}
    others = iter(unseen.tolist())
    for tokens, labels in zip(*(x.tolist() for x in test), strict=True):
        followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for place, label in enumerate(labels):
            for order in range(1, min(place, longest) + 1):
                followers[tuple(tokens[place - order : place])][tokens[place]] += 1
            if label == IGNORE_INDEX:
                continue
            other = next(others)
            for order, guesses in found.items():
                guesses.append(_follower(followers, tokens[: place + 1], order, other))
    return {f"{order}-grams of the sequence": torch.tensor(found[order]) for order in found}


def _follower(
    followers: Mapping[tuple[int, ...], Counter[int]], past: list[int], order: int, other: int
) -> int:
    contexts = (tuple(past[-n:]) for n in range(min(order, len(past)), 0, -1))
    known = (followers[context] for context in contexts if context in followers)
    return next((counter.most_common(1)[0][0] for counter in known), other)


def n_gram_labels(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], longest: int = LONGEST
) -> Predictions:
    """Predict labels from the last 1 … `longest` tokens, the one that is labelled included.

    Args:
        train: Tokens and labels ``[n t]`` that are counted.
        test: Tokens and labels ``[n t]`` that are predicted. A context that was not counted is cut
            at its far end.

    Returns:
        Predictions ``[n']`` of each order.
    """
    counts: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(longest + 1)]
    for context, label in _labelled(train, longest):
        for order in range(longest + 1):
            counts[order][_last(context, order)][label] += 1
    best = [{key: c.most_common(1)[0][0] for key, c in table.items()} for table in counts]
    contexts = [context for context, _ in _labelled(test, longest)]
    return {
        f"{order}-grams": torch.tensor([_look_up(best, context, order) for context in contexts])
        for order in range(1, longest + 1)
    }


def _look_up(best: list[dict[bytes, int]], context: np.ndarray, order: int) -> int:
    """The label of the longest context that was counted."""
    keys = ((n, _last(context, n)) for n in range(order, -1, -1))
    return next(best[n][key] for n, key in keys if key in best[n])


def _last(context: np.ndarray, count: int) -> bytes:
    return context[len(context) - count :].tobytes()


def _labelled(rows: tuple[Tensor, Tensor], longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """Each label with the tokens up to it, −1 before the first."""
    tokens, labels = (x.numpy() for x in rows)
    padded = np.pad(tokens, ((0, 0), (longest - 1, 0)), constant_values=-1)
    for row, place in zip(*np.nonzero(labels != IGNORE_INDEX), strict=True):
        yield padded[row, place : place + longest], int(labels[row, place])


def linear_classifier(
    train: tuple[Tensor, Tensor], inputs: Tensor, classes: int, ridge: float = 1e-2
) -> Tensor:
    """Predict classes by least squares on all numbers of an example.

    Args:
        train: Examples ``[n …]`` and their classes ``[n]``.
        inputs: Examples ``[m …]`` to classify.
        classes: Number of classes.
        ridge: Penalty, relative to the mean square of a number.

    Returns:
        The classes ``[m]``.
    """
    x, y = (_with_one(part) for part in (train[0], inputs))
    gram = x.T @ x
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    wanted = torch.nn.functional.one_hot(train[1], classes).double()
    return (y @ torch.linalg.solve(gram, x.T @ wanted)).argmax(-1)


def _with_one(examples: Tensor) -> Tensor:
    flat = examples.flatten(1).double()
    return torch.cat([flat, torch.ones_like(flat[:, :1])], 1)
