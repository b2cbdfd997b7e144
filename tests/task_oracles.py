"""The benchmarks' generators as their code has them, one example at a time, with numpy's own draws."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Recall(NamedTuple):
    keys: np.ndarray
    values: np.ndarray
    slots: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray


def mqar(generator: np.random.RandomState, count: int, vocabulary: int, length: int, pairs: int) -> Recall:
    """Zoology's multi-query associative recall without random tokens, example by example."""
    space = (length - 2 * pairs) // 2
    p = 0.01 * np.arange(1, space + 1) ** (0.01 - 1)
    rows = []
    for _ in range(count):
        keys = generator.choice(np.arange(1, vocabulary // 2), pairs, replace=False)
        values = generator.choice(np.arange(vocabulary // 2, vocabulary), pairs, replace=False)
        slots = generator.choice(space, pairs, replace=False, p=p / p.sum())
        tokens, labels = [token for pair in zip(keys, values, strict=True) for token in pair], []
        tokens += [0] * (length + 1 - len(tokens))
        labels = [-100] * (length + 1)
        for key, value, slot in zip(keys, values, slots, strict=True):
            tokens[2 * pairs + 2 * slot] = key
            labels[2 * pairs + 2 * slot + 1] = value
        rows.append(Recall(keys, values, slots, np.array(tokens[:-1]), np.array(labels[1:])))
    return Recall(*(np.stack(part) for part in zip(*rows, strict=True)))
