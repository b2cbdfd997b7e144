"""A linearized model against its own softmax: time and memory of generation (LoLCATs, figure 2)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights.generate import Decoder, likeliest
from fastweights.linearize import Mode, Student, Teacher, cache_bytes, use_mode
from fastweights.render.plots import PALETTE, canvas, label, legend, logarithmic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTENDERS: dict[str, Mode] = {"linear": Student(), "softmax": Teacher()}
"""Ways to run one model: softmax through the implementation it was loaded with, SDPA unless told
otherwise.
"""
TOKENS = (128, 512, 2048, 8192, 32768)


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
                self.token = likeliest(self.decoder.read(self.token))[:, None]
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


def memory_ratio(rows: Iterable[GenerationRow], contender: str = "linear") -> float:
    """Divide the state bytes after the most tokens by those after the fewest; the largest of all
    batches."""
    by_batch: dict[int, list[GenerationRow]] = {}
    for row in rows:
        if row.contender == contender:
            by_batch.setdefault(row.batch, []).append(row)
    return max(_most(found).state_bytes / _fewest(found).state_bytes for found in by_batch.values())


def crossover(rows: Iterable[GenerationRow], batch: int) -> int | None:
    """Return the number of generated tokens from which on the linear model has taken less time, or
    None."""
    seconds = {(row.contender, row.tokens): row.seconds for row in rows if row.batch == batch}
    counts = sorted({count for _, count in seconds}, reverse=True)
    found = None
    for count in counts:
        if seconds["linear", count] > seconds["softmax", count]:
            break
        found = count
    return found


def _most(rows: list[GenerationRow]) -> GenerationRow:
    return max(rows, key=lambda row: row.tokens)


def _fewest(rows: list[GenerationRow]) -> GenerationRow:
    return min(rows, key=lambda row: row.tokens)


def plot_generation(rows: Sequence[GenerationRow]) -> Figure:
    """Draw throughput against batch, and seconds and state bytes against generated tokens."""
    figure, axes = canvas(1, 3)
    first, least = min(row.tokens for row in rows), min(row.batch for row in rows)
    for color, contender in zip(PALETTE, CONTENDERS, strict=False):
        own = [row for row in rows if row.contender == contender]
        short, single = (
            [row for row in own if row.tokens == first],
            [row for row in own if row.batch == least],
        )
        line = {"color": color, "marker": "o", "markersize": 3, "label": contender}
        axes[0, 0].plot([row.batch for row in short], [row.throughput for row in short], **line)
        axes[0, 1].plot([row.tokens for row in single], [row.seconds for row in single], **line)
        axes[0, 2].plot(
            [row.tokens for row in single], [row.state_bytes / 2**20 for row in single], **line
        )
    label(axes[0, 0], f"{first} tokens after the prompt", "sequences", "tokens per second")
    label(axes[0, 1], f"{least} sequence{'s' * (least > 1)}", "generated tokens", "seconds")
    label(axes[0, 2], f"{least} sequence{'s' * (least > 1)}", "generated tokens", "state, MiB")
    for one in axes.flat:
        one.set_xscale("log", base=2)
        logarithmic(one)
        legend(one)
    return figure
