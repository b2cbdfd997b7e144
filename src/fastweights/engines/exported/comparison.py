"""A mixer in another engine beside our own decoding: how far, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.engines.exported.program import DecodingProgram, Exported
from fastweights.generate import Decoder
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

VOCABULARY = 64

Call = Callable[[Tensor, list[Any]], tuple[Tensor, list[Any]]]
"""(input_ids, states) → (logits, states after them)"""


class Speed(NamedTuple):
    """Tokens per second of a prompt, and behind it."""

    prefill: float
    decode: float


class Compared(NamedTuple):
    """What is found of a model.

    Attributes:
        error: the largest difference of a logit, relative to the largest logit
        theirs: the engine's speed
        ours: that of our `Decoder`
    """

    error: float
    theirs: Speed
    ours: Speed


@dataclass(frozen=True)
class EngineComparison:
    """A prompt and tokens behind it, read by an engine and by us, in alternating rounds.

    Attributes:
        prompt: its tokens
        decoded: tokens behind it
        rounds: of speeds, of which the median counts
    """

    prompt: int
    decoded: int = 64
    rounds: int = 5

    @torch.no_grad()
    def compare(self, model: Exported, call: Call) -> Compared:
        """What is found of an engine that reads tokens by `call`."""
        ids, states = self._tokens(model), DecodingProgram(model).layout.empty()
        both = zip(*self._speeds(model, call, ids, states), strict=True)
        speeds = (Speed(*map(median, zip(*s, strict=True))) for s in both)
        return Compared(self.error(model, call), *speeds)

    @torch.no_grad()
    def error(self, model: Exported, call: Call) -> float:
        """The largest difference of a logit, relative to the largest logit."""
        ids, states = self._tokens(model), DecodingProgram(model).layout.empty()
        ours = model(input_ids=ids, use_cache=False).logits
        theirs = torch.cat(list(self._read(call, ids, states)), 1)
        return float((theirs - ours).abs().max() / ours.abs().max())

    def _tokens(self, model: Exported) -> Tensor:
        drawn = torch.Generator().manual_seed(0)
        shape = (1, self.prompt + self.decoded)
        ids = torch.randint(model.config.vocab_size, shape, generator=drawn)
        return ids.to(model.device)

    def _pieces(self, ids: Tensor) -> list[Tensor]:
        return [ids[:, : self.prompt], *ids[:, self.prompt :].split(1, 1)]

    def _read(self, call: Call, ids: Tensor, states: list[Any]) -> Iterator[Tensor]:
        """Logits after the prompt, and after every token behind it."""
        for piece in self._pieces(ids):
            logits, states = call(piece, states)
            yield logits

    def _speeds(
        self, model: Exported, call: Call, ids: Tensor, states: list[Any]
    ) -> Iterator[tuple[Speed, Speed]]:
        """The engine's and ours, in every round."""
        for _ in range(self.rounds):
            theirs = self._speed(self._read(call, ids, states))
            yield theirs, self._speed(_decode(Decoder(model), self._pieces(ids)))

    def _speed(self, reading: Iterator[Tensor]) -> Speed:
        start = perf_counter()
        next(reading)
        middle = perf_counter()
        for _ in reading:
            pass
        return Speed(self.prompt / (middle - start), self.decoded / (perf_counter() - middle))


def one_layer(mixer: str, width: int) -> FastWeightsForCausalLM:
    """A model of one layer of random weights."""
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=1, mixers=[{"name": mixer}]
    )
    return FastWeightsForCausalLM(config).eval()


def _decode(decoder: Decoder, pieces: list[Tensor]) -> Iterator[Tensor]:
    prompt, *tokens = pieces
    yield decoder.read(prompt)
    for token in tokens:
        yield decoder.read_token(token[:, 0])
