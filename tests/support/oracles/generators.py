"""The benchmarks' generators as their code has them, one example at a time, with numpy's
own draws.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Recall(NamedTuple):
    keys: np.ndarray
    values: np.ndarray
    slots: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray


def mqar(
    generator: np.random.RandomState, count: int, vocabulary: int, length: int, pairs: int
) -> Recall:
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


class Told(NamedTuple):
    """MAD's recall: the draws of one sequence, and the sequence."""

    keys: list[int]
    meaning: dict[int, int]
    fillers: list[tuple[int, int]]
    probe: int
    tokens: list[int]
    labels: list[int]


def mad_recall(
    generator: np.random.Generator, vocabulary: int, length: int, noise_tokens: int, noise: float
) -> Told:
    """MAD's (noisy) multi-query in-context recall: pairs one by one, then a pair that was there."""
    plain = vocabulary - noise_tokens
    told = Told([], {}, [], 0, [], [])
    spared = generator.integers(length // 2)
    seen: list[int] = []
    for pair in range(length // 2 - 1):
        if pair != spared and generator.random() < noise:
            filler = tuple(int(token) for token in generator.integers(plain, vocabulary, size=2))
            told.keys.append(0)
            told.fillers.append((filler[0], filler[1]))
            told.tokens.extend(filler)
            told.labels.extend((-100, -100))
            continue
        key = int(generator.integers(plain // 2))
        value = told.meaning.setdefault(key, int(generator.integers(plain // 2, plain)))
        told.keys.append(key)
        told.fillers.append((-1, -1))
        told.tokens.extend((key, value))
        told.labels.extend((-100, value if key in seen else -100))
        seen.append(key)
    probe = sorted(set(seen))[generator.integers(len(set(seen)))]
    told.tokens.extend((probe, told.meaning[probe]))
    told.labels.extend((-100, told.meaning[probe]))
    return told._replace(probe=probe)


class Offered(NamedTuple):
    """MAD's fuzzy recall: the pairs that one sequence was offered, the last being asked for, and
    the sequence.
    """

    keys: list[tuple[int, ...]]
    values: list[tuple[int, ...]]
    place: int
    tokens: list[int]
    labels: list[int]


def mad_fuzzy(
    generator: np.random.Generator, vocabulary: int, length: int, motif: int, *, testing: bool
) -> Offered:
    """MAD's multi-query fuzzy recall, motif by motif, with its padding on the left; ``length + 1``
    tokens.
    """
    half = (vocabulary - 1) // 2

    def draw(low: int, high: int, shortest: int) -> tuple[int, ...]:
        size = generator.integers(shortest, motif + 1)
        return tuple(
            int(token) for token in generator.choice(np.arange(low, high), size=size, replace=False)
        )

    def key() -> tuple[int, ...]:
        return draw(0, half, motif if testing else 1)

    def value() -> tuple[int, ...]:
        return draw(half, vocabulary - 1, 1)

    asked, answer = key(), value()
    place = int(generator.integers(length - 2 * len(asked + answer)))
    offered, tokens, labels, meaning, shown = Offered([], [], place, [], []), [], [], {}, False
    while len(tokens) < length - len(asked + answer) - 2 * motif:
        if len(tokens) >= place and not shown:
            tokens += asked + answer
            labels += [-100] * len(asked + answer)
            meaning[asked], shown = answer, True
            continue
        k, v = key(), value()
        offered.keys.append(k)
        offered.values.append(v)
        known = k in meaning
        shown = shown or k == asked
        v = meaning.setdefault(k, answer if k == asked else v)
        tokens += k + v
        labels += [-100] * len(k) + (list(v) if known else [-100] * len(v))
    tokens += asked + answer
    labels += [-100] * len(asked) + list(answer)
    padding = length + 1 - len(tokens)
    offered.keys.append(asked)
    offered.values.append(answer)
    return offered._replace(
        tokens=[vocabulary - 1] * padding + tokens, labels=[-100] * padding + labels
    )


def mad_copying(
    generator: np.random.RandomState, vocabulary: int, length: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, places of blanks, inputs, labels) of MAD's selective copying."""
    blanks = length - 2 * count - 1
    tokens = generator.randint(0, vocabulary - 2, count)
    before = generator.randint(0, count, blanks)
    inputs = [*np.insert(tokens, before, vocabulary - 2), vocabulary - 1, *[vocabulary - 2] * count]
    return tokens, before, np.array(inputs), np.array([-100] * (length - count) + list(tokens))


def mad_table(vocabulary: int, seed: int) -> dict[int, int]:
    """MAD's memorized values: motifs of one token in a list, shuffled."""
    generator, plain = np.random.default_rng(seed), vocabulary - 1
    keys, values = (
        [(key,) for key in range(plain // 2)],
        [(value,) for value in range(plain // 2, plain)],
    )
    generator.shuffle(keys)
    generator.shuffle(values)
    return {key[0]: value[0] for key, value in zip(keys, values, strict=False)}
