"""Decoding token by token in constant memory, without the machinery of transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fastweights.layers import upcast
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn from logits ``[b vocab]``: → ``[b]``.

    Attributes:
        temperature: 0 takes the likeliest
        top_k: only among the k likeliest
        top_p: then only among the fewest likeliest that weigh p together
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature}; it is 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k}; it is at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}; it is above 0 and at most 1, or None")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
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


def stream(
    model: FastWeightsForCausalLM,
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
    """The continuation of ``input_ids [b t]``: one token ``[b]`` after the other.

    The prompt is read `chunk` tokens at a time, then memory stays constant (softmax layers aside).
    The stream ends after `max_new_tokens`, or when every sequence has ended with an eos token of
    ``model.generation_config``; one that ends early goes on with pad tokens. At temperature 0 this
    is greedy ``model.generate``.

    Args:
        attention_mask: ``[b t]``, 0 for the padding on the left
    """
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}; a prompt is read at least one token at a time")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens = {max_new_tokens}; it is at least 1, or None for no limit"
        )
    sampler = Sampler(temperature, top_k, top_p, generator)
    tokens = islice(
        _sample_endlessly(model, input_ids, attention_mask, sampler, chunk), max_new_tokens
    )
    eos = _eos_ids(model)
    pad = model.generation_config.pad_token_id
    return _stop_at_eos(tokens, eos, eos[0] if pad is None else pad) if eos else tokens


def _eos_ids(model: FastWeightsForCausalLM) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _sample_endlessly(
    model: FastWeightsForCausalLM, ids: Tensor, mask: Tensor | None, sample: Sampler, chunk: int
) -> Iterator[Tensor]:
    cache = FastWeightsCache()
    logits = _prefill(model, ids, mask, cache, chunk)
    while True:
        token = sample(logits)
        yield token
        logits = _next_logits(model, token[:, None], None, cache)


def _prefill(
    model: FastWeightsForCausalLM,
    ids: Tensor,
    mask: Tensor | None,
    cache: FastWeightsCache,
    chunk: int,
) -> Tensor:
    masks = [None] * len(ids.split(chunk, 1)) if mask is None else mask.split(chunk, 1)
    logits = ids.new_empty(0)
    for piece, kept in zip(ids.split(chunk, 1), masks, strict=True):
        logits = _next_logits(model, piece, kept, cache)
    return logits


@torch.inference_mode()
def _next_logits(
    model: FastWeightsForCausalLM, ids: Tensor, mask: Tensor | None, cache: FastWeightsCache
) -> Tensor:
    """Logits ``[b vocab]`` after the last of these tokens."""
    return model(ids, mask, cache, use_cache=True, logits_to_keep=1, return_dict=True).logits[:, -1]


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
