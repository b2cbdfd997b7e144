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
from fastweights.models.cache_names import CACHE
from fastweights.models.continuation import Continuation, continuation_of, require_cache
from fastweights.models.graph import (
    HostWaitError,
    StaticStep,
    capture_graph,
    refuse_graph,
    sizes_of,
)
from fastweights.models.hf import FastWeightsPreTrainedModel
from fastweights.models.inputs import keep_mask_of, padding_first, require_token_ids
from fastweights.models.token_reader import TokenReader


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
    (softmax layers aside); any other model of transformers with a cache keeps all keys
    and values. On a GPU, single tokens are read by a CUDA graph once the cache has stopped growing.

    Attributes:
        model: in evaluation mode
        cache: what the model has kept of the tokens so far; once tokens are read by a graph, its
            states are for this decoder alone to replace
        step: reads single tokens by a CUDA graph; None before there is one
    """

    def __init__(self, model: PreTrainedModel, cache: Any = None) -> None:
        self.model = model
        self.cache: Any = cache
        if cache is None:
            self.cache = _empty_cache(model)
        self.step: StaticStep | None = None
        self._name = CACHE
        self._seen: Tensor | None = None
        self._begun, self._count, self._sequences = cache is not None, _tokens_in(self.cache), 1
        self._host_waits: str | None = None
        self._eager: bool | None = None
        self._reader = TokenReader(model)

    @torch.inference_mode()
    def read(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read more tokens.

        Args:
            ids: ``[b t]``
            mask: ``[b t]``, 0 for padding; None if there is none. Our models alone take one

        Returns:
            the logits ``[b vocab]`` after the last of them
        """
        self.step = None
        if not self._begun:
            self._seen = None if isinstance(self.model, FastWeightsPreTrainedModel) else ids
            return self._read(ids, mask)
        way, logits = continuation_of(self.model), ids.new_empty(0)
        if self._seen is not None:
            self._seen = torch.cat([self._seen, ids], 1)
            if not way.most:
                self.cache, self._count = _empty_cache(self.model), 0
                return self._read(self._seen, mask)
        for piece in ids.split(int(max(1, min(way.most, ids.shape[1]))), 1):
            logits = self._read(piece, mask, **way.told(piece, self._count))
        return logits

    def _read(self, ids: Tensor, mask: Tensor | None, **told: Any) -> Tensor:
        model: Any = self.model
        self._sequences = len(ids)
        kept = {} if self.cache is None else {self._name: self.cache}
        output = model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
            **kept,
            **told,
        )
        self._name = require_cache(model, output)
        self.cache = getattr(output, self._name)
        self._begun, self._count = True, self._count + ids.shape[1]
        return output.logits[:, -1]

    def read_token(self, token: Tensor) -> Tensor:
        """`read` of one token ``[b]``; the logits ``[b vocab]`` may be overwritten by the next
        call.
        """
        return self._read_token(token, look=True)

    def read_next(self, token: Tensor) -> Tensor:
        """`read_token` of a model of which no part has been replaced since the last token."""
        return self._read_token(token, look=False)

    def _read_token(self, token: Tensor, look: bool) -> Tensor:
        if self.step is not None:
            return self.step(token)
        if self._eager is None:
            self._eager = self.refuse_graph() is not None
        if self._eager:
            return self._read_eagerly(token, look)
        before = sizes_of(self.cache)
        logits = self.read(token[:, None])
        if sizes_of(self.cache) == before:
            self._capture(logits)
        return logits

    @torch.inference_mode()
    def _read_eagerly(self, token: Tensor, look: bool) -> Tensor:
        self._sequences = len(token)
        if self._reader.refuse(self.cache, self._sequences, look) is not None:
            return self.read(token[:, None])
        self._count += 1
        return self._reader.step(token, self.cache)

    def refuse_native_step(self) -> str | None:
        """Why modules read the next token, None where a `NativeStep` does."""
        with torch.inference_mode():
            return self._reader.refuse(self.cache, self._sequences)

    def refuse_graph(self) -> str | None:
        """Why single tokens are not read by a CUDA graph, None where they are once all windows are
        full.
        """
        return self._host_waits or refuse_graph(self.model, self.cache)

    def _capture(self, logits: Tensor) -> None:
        step = StaticStep(self.model, self.cache, logits)
        try:
            step.capture(capture_graph)
        except HostWaitError as error:
            self._host_waits = f"a step makes the host wait for the device ({error})"
            self._eager = True
        else:
            self.step = step

    def read_prompt(self, ids: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
        """The same as `read`, `chunk` tokens at a time, so that memory does not grow with t; at
        once by a model that does not go on so.
        """
        way = continuation_of(self.model) if chunk < ids.shape[1] else Continuation()
        pieces = way.split(ids, chunk)
        masks = [None] * len(pieces) if mask is None else mask.split(pieces[0].shape[1], 1)
        logits = ids.new_empty(0)
        for piece, kept in zip(pieces, masks, strict=True):
            logits = self.read(piece, kept)
        return logits

    def decode(self, logits: Tensor, choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Tokens ``[b]`` without end, by a model that nobody changes meanwhile.

        Args:
            logits: ``[b vocab]`` after what has been read
            choose: the next token ``[b]`` of logits, such as a `Sampler` or `likeliest`
        """
        while True:
            token = choose(logits)
            yield token
            logits = self.read_next(token)


def _empty_cache(model: Any) -> Any:
    """None of a model that makes one of its own."""
    if isinstance(model, FastWeightsForCausalLM):
        return FastWeightsCache()
    return DynamicCache(config=model.config) if model._supports_default_dynamic_cache() else None


def _tokens_in(cache: Any) -> int:
    """How many tokens a cache says it has read; layers of states do not say."""
    return max(
        (p.get_seq_length() for p in getattr(cache, "layers", ()) if hasattr(p, "get_seq_length")),
        default=0,
    )


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
    cache: Any = None,
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
        cache: what the model has read before the prompts, which is advanced; None for nothing

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
    decoder = Decoder(model, cache)
    return islice(_sample(decoder, input_ids, attention_mask, sampler, chunk), max_new_tokens)


def _sample(
    decoder: Decoder, ids: Tensor, mask: Tensor | None, sampler: Sampler, chunk: int
) -> Iterator[Tensor]:
    model, eos = decoder.model, _eos_ids(decoder.model)
    logits = decoder.read_prompt(ids, mask, chunk)
    if not eos:
        yield from decoder.decode(logits, sampler)
        return
    pad = model.generation_config.pad_token_id
    yield from _decode_to_eos(decoder, logits, sampler, eos, eos[0] if pad is None else pad)


def _decode_to_eos(
    decoder: Decoder, logits: Tensor, sampler: Sampler, eos: list[int], pad: int
) -> Iterator[Tensor]:
    """Tokens with `pad` after a sequence's first of `eos`, until all sequences have one."""
    ends = torch.tensor(eos, device=logits.device)
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    while True:
        token = sampler(logits)
        shown = token.masked_fill(ended, pad)
        yield shown
        ended = ended | torch.isin(shown, ends)
        at_end = _ask(ended.all())
        if not ended.is_cuda and at_end():
            return
        # a GPU is not waited for: its answer is there once it has begun the next token
        logits = decoder.read_next(token)
        if at_end():
            return


def _ask(flag: Tensor) -> Callable[[], bool]:
    """Reads the flag; on a GPU that waits for what came before this call, not for what follows."""
    if not flag.is_cuda:
        return lambda: bool(flag)
    answer, there = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
    answer.copy_(flag, non_blocking=True)
    there.record()

    def read() -> bool:
        there.synchronize()
        return bool(answer)

    return read


def _eos_ids(model: PreTrainedModel) -> list[int]:
    eos = None if model.generation_config is None else model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
