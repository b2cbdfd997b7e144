"""A model's score on the items of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastweights.lab.evals.answers import answers
from fastweights.lab.evals.items import Choice, Ending, Item, Prompt
from fastweights.lab.evals.likelihood import Likelihood, Query, likelihoods, query
from fastweights.training.loop.report import Follow, unfollowed

_Read = Callable[[Sequence[Query]], list[Likelihood]]


@dataclass(frozen=True)
class ChoiceScore:
    """The likelihoods of the options of one choice.

    Attributes:
        nll: Σ -log p of each continuation, in nats.
        tokens: Tokens of each continuation.
        characters: Characters of each continuation.
        gold: Number of the right option.
    """

    nll: tuple[float, ...]
    tokens: tuple[int, ...]
    characters: tuple[int, ...]
    gold: int

    @property
    def by_sum(self) -> bool:
        """Whether the most likely continuation is right (lm-evaluation-harness's acc)."""
        return self._right(np.ones(len(self.nll)))

    @property
    def by_token(self) -> bool:
        """Whether the continuation of least NLL per token is right (MesaNet appendix L)."""
        return self._right(np.array(self.tokens))

    @property
    def by_character(self) -> bool:
        """Whether the continuation of least NLL per character is right (the harness's acc_norm)."""
        return self._right(np.array(self.characters))

    def _right(self, sizes: np.ndarray) -> bool:
        return int(np.argmin(np.array(self.nll) / sizes)) == self.gold


@dataclass(frozen=True)
class Answer:
    """A model's answer to a prompt, and whether it is right."""

    text: str
    right: bool


@dataclass(frozen=True)
class Scores:
    """The scores of a model on a task: means over the items, and one row per item.

    Attributes:
        metrics: Means by name.
        errors: The standard error of each mean.
        rows: The items' own scores.
    """

    metrics: dict[str, float]
    errors: dict[str, float]
    rows: tuple[ChoiceScore | Likelihood | Answer, ...]


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    *,
    batch: int = 16,
    follow: Follow = unfollowed,
) -> Scores:
    """Score a model on items of one kind.

    Choices have ``accuracy`` by the sum of NLL, per token and per character; endings have
    ``accuracy`` (each token the most likely one) and ``nll``; prompts have ``accuracy`` of the
    greedy answers, generated with the first item's settings.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        items: The items, all of one kind.
        batch: Items at once.
        follow: Told of every batch.

    Raises:
        ValueError: If there are no items, or items of several kinds.
    """
    kinds = {type(item) for item in items}
    if len(kinds) != 1:
        raise ValueError(
            "score takes items of one kind; got"
            f" {', '.join(kind.__name__ for kind in kinds) or 'no items'}"
        )
    read = partial(likelihoods, model, batch=batch, follow=follow)
    if Choice in kinds:
        return _choices(tokenizer, [item for item in items if isinstance(item, Choice)], read)
    if Ending in kinds:
        return _endings(tokenizer, [item for item in items if isinstance(item, Ending)], read)
    answer = partial(answers, model, tokenizer, batch=batch, follow=follow)
    return _prompts([item for item in items if isinstance(item, Prompt)], answer)


def _choices(tokenizer: PreTrainedTokenizerBase, items: Sequence[Choice], read: _Read) -> Scores:
    options = [
        pair for item in items for pair in zip(item.contexts, item.continuations, strict=True)
    ]
    queries = [query(tokenizer, context, f" {continuation}") for context, continuation in options]
    found = iter(read(queries))
    rows = [_chosen(item, [next(found) for _ in item.continuations]) for item in items]
    return _scores(
        rows,
        accuracy=[row.by_sum for row in rows],
        accuracy_per_token=[row.by_token for row in rows],
        accuracy_per_character=[row.by_character for row in rows],
    )


def _chosen(item: Choice, found: Sequence[Likelihood]) -> ChoiceScore:
    characters = tuple(map(len, item.continuations))
    return ChoiceScore(
        tuple(one.nll for one in found), tuple(one.tokens for one in found), characters, item.gold
    )


def _endings(tokenizer: PreTrainedTokenizerBase, items: Sequence[Ending], read: _Read) -> Scores:
    rows = read([query(tokenizer, item.context, item.continuation) for item in items])
    return _scores(rows, accuracy=[row.greedy for row in rows], nll=[row.nll for row in rows])


def _prompts(items: Sequence[Prompt], answer: Callable[..., list[str]]) -> Scores:
    how = items[0].answering
    prompts = [item.question.text for item in items]
    texts = answer(prompts, until=(how.stop,), tokens=how.tokens, context=how.context)
    rows = [Answer(text, item.right(text)) for item, text in zip(items, texts, strict=True)]
    return _scores(rows, accuracy=[row.right for row in rows])


def _scores(
    rows: Sequence[ChoiceScore | Likelihood | Answer], **columns: Sequence[float]
) -> Scores:
    metrics = {name: float(np.mean(values)) for name, values in columns.items()}
    errors = {name: float(np.std(values) / len(values) ** 0.5) for name, values in columns.items()}
    return Scores(metrics, errors, tuple(rows))
