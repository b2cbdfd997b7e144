"""Generation by a linearized model and by its own softmax: time and memory, and text side by
side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights.generate import Decoder, Sampler, likeliest
from fastweights.linearize.convert.attention import use_mode
from fastweights.linearize.convert.cache import cache_bytes
from fastweights.linearize.convert.modes import Mode, Student, Teacher
from fastweights.linearize.evaluate.logits import unwrap_adapters, without_adapters
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.language.adapters import merged_modules
from fastweights.training.loop.report import Follow, unfollowed

CONTENDERS: dict[str, Mode] = {"linear": Student(), "softmax": Teacher()}
"""Ways to run one model: softmax through the implementation it was loaded with, SDPA unless told
otherwise.
"""
TOKENS = (128, 512, 2048, 8192, 32768)
READ = (64, 256, 1024, 4096)
"""Tokens that are read before a few are timed."""
TIMED = (4, 20)
"""Tokens generated until the caches are warm, and until the clock is stopped."""
TOP_K = 50
"""Among how many tokens transformers draws unless a model says otherwise, and samples are drawn."""


@dataclass(frozen=True)
class GenerationRow:
    """The time and memory of generating `tokens` tokens for each of `batch` prompts.

    Attributes:
        prefill: Seconds for the prompts.
        seconds: Seconds for all generated tokens.
        last: Seconds for one token of each sequence, the mean since the row before.
        state_bytes: Most bytes that the cache has held for all sequences.
    """

    contender: str
    batch: int
    prompt: int
    tokens: int
    prefill: float
    seconds: float
    last: float
    state_bytes: int

    @property
    def throughput(self) -> float:
        """Generated tokens per second, of all sequences."""
        return self.batch * self.tokens / self.seconds


class _Race:
    """One contender's greedy generation, which can be left and taken up again."""

    def __init__(self, name: str, model: PreTrainedModel, prompt: Tensor) -> None:
        self.name, self.model, self.prompt = name, model, prompt
        self.decoder, self.tokens, self.seconds = Decoder(model), 0, 0.0
        self.token = prompt
        self.prefill = self._time_forwards(1)

    def to(self, tokens: int) -> GenerationRow:
        """Generate until there are `tokens`."""
        count = tokens - self.tokens
        spent = self._time_forwards(count)
        self.tokens, self.seconds = tokens, self.seconds + spent
        size = cache_bytes(self.decoder.cache)
        sizes = len(self.prompt), self.prompt.shape[1], tokens
        return GenerationRow(self.name, *sizes, self.prefill, self.seconds, spent / count, size)

    def _time_forwards(self, count: int) -> float:
        """Seconds for `count` forwards, each of which chooses what the next one reads."""
        start = self._now()
        with use_mode(self.model, CONTENDERS[self.name]):
            for _ in range(count):
                self.token = likeliest(_read(self.decoder, self.token))[:, None]
        return self._now() - start

    def _now(self) -> float:
        if self.prompt.is_cuda:
            torch.cuda.synchronize(self.prompt.device)
        return time.perf_counter()


def bench_generation(
    model: Any,
    batches: Sequence[int] = (1, 4, 16),
    prompt: int = 64,
    tokens: Sequence[int] = TOKENS,
    seconds: float = 600.0,
) -> Iterator[GenerationRow]:
    """Measure generation by a linearized model, with its linear attention and with its softmax.

    Prompts are random. The contenders take turns after every stretch of tokens, so that whatever
    else the machine does affects both alike; a batch is over when one of them has used up its
    `seconds`. A model with learnt positions needs as many of them.

    Args:
        model: The linearized model.
        batches: Numbers of sequences.
        prompt: Tokens of each prompt.
        tokens: Numbers of generated tokens at which a row is measured.
        seconds: Time limit of each contender and batch.

    Yields:
        A row for each contender, batch and number of tokens, as it is measured.
    """
    training = model.training
    with ExitStack() as after:
        after.callback(model.train, training)
        model.eval()
        for batch in batches:
            yield from _run_race(model, batch, prompt, sorted(tokens), seconds)


def _run_race(
    model: Any, batch: int, prompt: int, tokens: Iterable[int], seconds: float
) -> Iterator[GenerationRow]:
    generator = torch.Generator().manual_seed(batch)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (batch, prompt), generator=generator).to(model.device)
    races = [_Race(name, model, ids) for name in CONTENDERS]
    for count in tokens:
        yield from (race.to(count) for race in races)
        if max(race.seconds for race in races) > seconds:
            return


def short_bench(model: Any, length: int, follow: Follow = unfollowed) -> list[GenerationRow]:
    """Time a few tokens of generation by a conversion and by its softmax, after a few lengths; its
    adapters are merged, as they will be.

    Args:
        model: The linearized model, with adapters or without.
        length: Tokens that may be read.
        follow: Told of every number of tokens that are read.

    Returns:
        Rows for both; none where the weights are quantised, which those of the result are not.
    """
    inside = unwrap_adapters(model)
    if getattr(inside, "is_quantized", False):
        return []
    prompts = [prompt for prompt in READ if prompt + TIMED[-1] <= length]
    with merged_modules(model):
        return [
            row
            for prompt in follow(prompts, "timing generation")
            for row in bench_generation(inside, (1,), prompt, TIMED)
            if row.tokens == TIMED[-1]
        ]


def _read(decoder: Decoder, ids: Tensor) -> Tensor:
    """The logits after ``ids [b t]``, of a single token by the model's own step if it has one."""
    alone = ids.shape[1] == 1 and decoder.refuse_native_step() is None
    return decoder.read_token(ids[:, 0]) if alone else decoder.read(ids)


@dataclass(frozen=True)
class PairedSample:
    """A continuation of one prompt by a conversion and by its softmax.

    Attributes:
        prompt: The prompt.
        drawn: False for the likeliest token at every step, True for tokens drawn by both from the
            same seed.
        softmax: The softmax model's continuation.
        linear: The conversion's.
    """

    prompt: str
    drawn: bool
    softmax: str
    linear: str


def generate_samples(
    model: Any,
    original: PreTrainedModel | None,
    tokenizer: Any,
    prompts: Tensor,
    tokens: int,
    follow: Follow = unfollowed,
) -> list[PairedSample]:
    """Continue prompts by a conversion and by its softmax, greedily and by drawing.

    Args:
        model: The linearized model, with adapters or without.
        original: The softmax model; None for `model` itself, without its adapters.
        tokenizer: The tokenizer.
        prompts: ``[b t]``.
        tokens: How many tokens come after each of them.
        follow: Told of every one.
    """
    inside = unwrap_adapters(model)
    with evaluation_mode(model):
        with merged_modules(model):
            linear = _continuations(inside, prompts, tokens, follow)
        if original is None:
            with without_adapters(model), use_mode(model, Teacher()):
                softmax = _continuations(inside, prompts, tokens, follow)
        else:
            softmax = _continuations(original, prompts, tokens, follow)
    words = partial(_decode, tokenizer)
    both = zip(prompts.repeat(2, 1), softmax, linear, strict=True)
    return [
        PairedSample(words(prompt), number >= len(prompts), words(by_softmax), words(by_linear))
        for number, (prompt, by_softmax, by_linear) in enumerate(both)
    ]


def _continuations(model: PreTrainedModel, prompts: Tensor, tokens: int, follow: Follow) -> Tensor:
    """``[2b tokens]``: the likeliest of all prompts, then those drawn."""
    decoder, count = Decoder(model), len(prompts)
    draw = Sampler(top_k=TOP_K, generator=torch.Generator(model.device).manual_seed(0))
    choose = lambda logits: torch.cat([likeliest(logits[:count]), draw(logits[count:])])  # noqa: E731
    logits = decoder.read(prompts.repeat(2, 1).to(model.device))
    steps = follow(range(tokens), "sampling")
    pairs = zip(steps, decoder.decode(logits, choose), strict=False)
    return torch.stack([token for _, token in pairs], 1).cpu()


def _decode(tokenizer: Any, tokens: Tensor) -> str:
    """The text as far as its first end."""
    ids: list[int] = tokens.tolist()
    end = tokenizer.eos_token_id
    return tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
