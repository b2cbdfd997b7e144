"""The loss of n-grams: a language model above it has not even learnt what neighbours say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log

DISCOUNT = 0.75
"""Taken from every count and given to shorter contexts (Ney, Essen and Kneser, 1994)."""


class NGrams:
    """Interpolated n-grams with absolute discounting.

    Args:
        tokens: The text that is counted.
        order: Tokens of the longest n-gram.
        vocabulary: Number of different tokens; a token without a context has one chance in as many.
    """

    def __init__(self, tokens: Sequence[int], order: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.counts = [
            Counter(zip(*(tokens[skip:] for skip in range(n)), strict=False))
            for n in range(1, order + 1)
        ]
        self.totals, self.kinds = [], []
        for counts in self.counts:
            total, kinds = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
            for gram, count in counts.items():
                total[gram[:-1]] += count
                kinds[gram[:-1]] += 1
            self.totals.append(total)
            self.kinds.append(kinds)

    def probability(self, context: tuple[int, ...], token: int) -> float:
        """Return the probability of a token after a context of fewer than `order` tokens."""
        found = 1 / self.vocabulary
        for n in range(len(context) + 1):
            seen = context[len(context) - n :]
            total = self.totals[n][seen]
            if not total:
                break
            kept = max(self.counts[n][(*seen, token)] - DISCOUNT, 0) / total
            found = kept + DISCOUNT * self.kinds[n][seen] / total * found
        return found

    def loss(self, tokens: Sequence[int], order: int, places: Sequence[int] = ()) -> float:
        """Return the mean of -log p in nats, by the last `order` tokens, over the tokens at
        `places`; over all but the first if there are none."""
        places = places or range(1, len(tokens))
        return -sum(
            log(self.probability(tuple(tokens[max(0, t + 1 - order) : t]), tokens[t]))
            for t in places
        ) / len(places)
