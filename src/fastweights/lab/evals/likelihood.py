"""The likelihood of a continuation after a context, for any causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastweights.layers import upcast
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.loop.report import Follow, unfollowed


class Query(NamedTuple):
    """A context and a continuation as token ids, at least one each."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation.

    Attributes:
        nll: Σ -log p of its tokens, in nats.
        tokens: Number of its tokens.
        greedy: Whether each token was the most likely one.
    """

    nll: float
    tokens: int
    greedy: bool


def query(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> Query:
    """Tokenize a context and a continuation, cut where lm-evaluation-harness does.

    Spaces that end the context belong to the continuation. Both are tokenized as one text, and its
    first tokens, as many as the context alone has, are the context; an empty context becomes the
    token that separates documents in training.

    Raises:
        ValueError: If the continuation adds no token.
    """
    whole, kept = context + continuation, context.rstrip()
    before = _ids(tokenizer, kept) if kept else [boundary(tokenizer)]
    after = _ids(tokenizer, whole)[len(before) if kept else 0 :]
    if not after:
        raise ValueError(
            f"the continuation {continuation!r} adds no token to its context; it cannot be scored"
        )
    return Query(before, after)


def boundary(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token before a document's first: end-of-text or, for a tokenizer without one, a
    new line."""
    end = cast(int | None, tokenizer.eos_token_id)
    return _ids(tokenizer, "\n\n")[-1] if end is None else end


def likelihoods(
    model: PreTrainedModel,
    queries: Sequence[Query],
    *,
    batch: int = 16,
    follow: Follow = unfollowed,
) -> list[Likelihood]:
    """Compute the likelihoods of `queries`, in their order.

    Queries that differ in their last token alone, such as one-token answers to a question, are read
    once.

    Args:
        model: The language model.
        queries: Contexts and continuations.
        batch: Queries of similar length that are read at once.
        follow: Told of every batch.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(queries):
        alike.setdefault((*context, *continuation[:-1]), []).append(number)
    order = sorted(alike.values(), key=lambda numbers: sum(map(len, queries[numbers[0]])))
    found: dict[int, Likelihood] = {}
    with evaluation_mode(model):
        for first in follow(range(0, len(order), batch), "reading"):
            chosen = order[first : first + batch]
            asked = [[queries[number] for number in numbers] for numbers in chosen]
            for numbers, answers in zip(chosen, _read(model, asked), strict=True):
                found |= zip(numbers, answers, strict=True)
    return [found[i] for i in range(len(queries))]


def _read(model: PreTrainedModel, asked: Sequence[Sequence[Query]]) -> Iterator[list[Likelihood]]:
    """The likelihoods of what is asked after one text each, from the first of these; padding on the
    right is seen by no token that is scored."""
    rows = [torch.tensor(queries[0].context + queries[0].continuation) for queries in asked]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    first = min(len(context) for queries in asked for context, _ in queries) - 1
    kept = _last_only(model, ids.shape[1] - first)
    logits = model(input_ids=ids, use_cache=False, return_dict=True, **kept).logits
    for queries, scores in zip(asked, logits[:, first - ids.shape[1] :], strict=True):
        begins = [len(context) - 1 - first for context, _ in queries]
        yield [
            likelihood(scores[begin : begin + len(after)], torch.tensor(after))
            for begin, (_, after) in zip(begins, queries, strict=True)
        ]


def _last_only(model: nn.Module, count: int) -> dict[str, int]:
    """What a model is told in order not to compute other logits than those of its last tokens."""
    takes = "logits_to_keep" in signature(model.forward).parameters
    return {"logits_to_keep": count} if takes else {}


def likelihood(logits: Tensor, targets: Tensor) -> Likelihood:
    """Compute the likelihood of ``targets [t]`` by ``logits [t vocab]``, each of the position
    before."""
    log_p = upcast(logits).log_softmax(-1)
    targets = targets.to(log_p.device)
    nll = -log_p.gather(-1, targets[:, None]).double().sum()
    return Likelihood(float(nll), len(targets), bool((log_p.argmax(-1) == targets).all()))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
