"""Greedy answers of language models to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from fastweights.lab.evals.likelihood import boundary
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.loop.report import Follow, unfollowed


class _Until(StoppingCriteria):
    """A sequence ends when what it has generated contains one of `ends`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[str], prompt: int
    ) -> None:
        self.tokenizer, self.ends, self.prompt = tokenizer, ends, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt :])
        return torch.tensor(
            [any(end in text for end in self.ends) for text in texts], device=input_ids.device
        )


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    until: Sequence[str] = ("\n",),
    tokens: int = 48,
    context: int | None = 2000,
    batch: int = 16,
    follow: Follow = unfollowed,
) -> list[str]:
    """Generate the greedy continuation of each prompt, cut before the first of `until`.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        prompts: The prompts.
        until: Texts before which an answer ends.
        tokens: Most tokens of an answer.
        context: Tokens of a prompt that are read, its last ones; None for all.
        batch: Prompts at once.
        follow: Told of every batch.
    """
    found: list[str] = []
    read = slice(None if context is None else -context, None)
    ids = [
        tokenizer.encode(prompt, add_special_tokens=False)[read] or [boundary(tokenizer)]
        for prompt in prompts
    ]
    for first in follow(range(0, len(ids), batch), "answering"):
        found += _continue_batch(model, tokenizer, ids[first : first + batch], until, tokens)
    return found


def _continue_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    until: Sequence[str],
    tokens: int,
) -> list[str]:
    length, pad = max(map(len, rows)), boundary(tokenizer)
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], device=model.device)
    keep = torch.tensor(
        [[0] * (length - len(row)) + [1] * len(row) for row in rows], device=model.device
    )
    stop = StoppingCriteriaList([_Until(tokenizer, until, length)] if until else [])
    with evaluation_mode(model):
        generated = cast(Any, model).generate(
            ids,
            attention_mask=keep,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=pad,
            stopping_criteria=stop,
        )
    texts = tokenizer.batch_decode(generated[:, length:], skip_special_tokens=True)
    return [_before(text, until) for text in texts]


def _before(text: str, ends: Sequence[str]) -> str:
    places = [place for end in ends if (place := text.find(end)) >= 0]
    return text[: min(places, default=len(text))]
