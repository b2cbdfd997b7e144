"""Decoding token by token in constant memory, without the machinery of transformers' generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fastweights.layers import upcast
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.models.inputs import keep_mask_of, padding_first, require_token_ids


@dataclass(frozen=True)
class Sampler:
    """Draws a token ``[b]`` from logits ``[b vocab]``.

    Attributes:
        temperature: what the logits are divided by; 0 takes the likeliest token
        top_k: draw among the k likeliest tokens only
        top_p: then among the fewest likeliest that weigh p together only
        generator: the source of random numbers; None for torch's own
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ValueError(f"temperature = {self.temperature}; it is 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k}; it is at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; it is above 0 and at most 1, or None")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return likeliest(logits)
        p = self._nucleus(self._likeliest(upcast(logits) / self.temperature).softmax(-1))
        return torch.multinomial(p, 1, generator=self.generator).squeeze(-1)

    def _likeliest(self, logits: Tensor) -> Tensor:
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return logits
        least = logits.topk(self.top_k, dim=-1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)

    def _nucleus(self, p: Tensor) -> Tensor:
        if self.top_p is None:
            return p
        ordered, order = p.sort(dim=-1, descending=True)
        above = ordered.cumsum(-1) - ordered
        return torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(above >= self.top_p, 0))


class Decoder:
    """A causal language model and the cache of what it has read: the one way tokens are decoded.

    The cache of our models, and of linearized ones, stays as large as it is after the first token
    (softmax layers aside); any other model of transformers with ``past_key_values`` keeps all keys
    and values.

    Attributes:
        model: in evaluation mode
        cache: what the model has kept of the tokens so far
    """

    def __init__(self, model: PreTrainedModel) -> None:
        own = isinstance(model, FastWeightsForCausalLM)
        self.model = model
        self.cache: Any = FastWeightsCache() if own else DynamicCache(config=model.config)

    @torch.inference_mode()
    def read(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read more tokens.

        Args:
            ids: ``[b t]``
            mask: ``[b t]``, 0 for padding; None if there is none. Our models alone take one

        Returns:
            the logits ``[b vocab]`` after the last of them
        """
        model: Any = self.model
        output = model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        return output.logits[:, -1]

    def read_prompt(self, ids: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """The same as `read`, `chunk` tokens at a time, so that memory does not grow with t."""
        masks = [None] * len(ids.split(chunk, 1)) if mask is None else mask.split(chunk, 1)
        logits = ids.new_empty(0)
        for piece, kept in zip(ids.split(chunk, 1), masks, strict=True):
            logits = self.read(piece, kept)
        return logits

    def decode(self, logits: Tensor, choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Tokens ``[b]`` without end.

        Args:
            logits: ``[b vocab]`` after what has been read
            choose: the next token ``[b]`` of logits, such as a `Sampler` or `likeliest`
        """
        while True:
            token = choose(logits)
            yield token
            logits = self.read(token[:, None])


def likeliest(logits: Tensor) -> Tensor:
    """The token ``[b]`` of the largest of the logits ``[b vocab]``."""
    return logits.argmax(-1)


def stream(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    chunk: int = 2048,
) -> Iterator[Tensor]:
    """Generate the continuation of a prompt, one token after the other, in constant memory.

    The prompt is read `chunk` tokens at a time, then memory stays constant (softmax layers aside).
    The stream ends after `max_new_tokens`, or when every sequence has ended with an eos token of
    ``model.generation_config``; one that ends early goes on with pad tokens. At temperature 0 this
    is greedy ``model.generate``.

    Args:
        model: one of ours, a linearized one, or any causal language model of transformers
        input_ids: the prompts ``[b t]``
        attention_mask: ``[b t]``, 0 for padding, on either side; for our models only
        max_new_tokens: None for no limit
        temperature: what the logits are divided by; 0 takes the likeliest token
        top_k: draw among the k likeliest tokens only
        top_p: draw among the fewest likeliest tokens that weigh p together
        generator: the source of random numbers; None for torch's own
        chunk: tokens of the prompt that are read at once

    Returns:
        tokens ``[b]``

    Raises:
        TypeError: for prompts that are not token ids
        ValueError: for an argument out of its range, or a mask for a model that is not ours
    """
    input_ids = require_token_ids(input_ids)
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}; a prompt is read at least one token at a time")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens = {max_new_tokens}; it is at least 1, or None for no limit"
        )
    if attention_mask is not None and not isinstance(model, FastWeightsForCausalLM):
        raise ValueError(
            f"stream takes no attention_mask for a {type(model).__name__}; give prompts of one"
            " length, or use model.generate"
        )
    if attention_mask is not None:
        keep_mask_of(attention_mask, input_ids[..., None], 0)
        attention_mask, input_ids = padding_first(attention_mask, input_ids)
    sampler = Sampler(temperature, top_k, top_p, generator)
    tokens = islice(_sample(model, input_ids, attention_mask, sampler, chunk), max_new_tokens)
    eos = _eos_ids(model)
    pad = model.generation_config.pad_token_id if eos else None
    return _stop_at_eos(tokens, eos, eos[0] if pad is None else pad) if eos else tokens


def _sample(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, sampler: Sampler, chunk: int
) -> Iterator[Tensor]:
    decoder = Decoder(model)
    yield from decoder.decode(decoder.read_prompt(ids, mask, chunk), sampler)


def _eos_ids(model: PreTrainedModel) -> list[int]:
    eos = None if model.generation_config is None else model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _stop_at_eos(tokens: Iterator[Tensor], eos: list[int], pad: int) -> Iterator[Tensor]:
    """`tokens` with `pad` after a sequence's first of `eos`, until all sequences have one."""
    ended = torch.tensor(False)
    for token in tokens:
        ended = ended.to(token.device)
        token = token.masked_fill(ended, pad)
        yield token
        ended = ended | torch.isin(token, torch.tensor(eos, device=token.device))
        if ended.all():
            return
