"""A mixer in another engine beside our own decoding: how far, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.engines.exported.program import Program
from fastweights.generate import Decoder
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

VOCABULARY = 64

Call = Callable[[Tensor, list[Any]], tuple[Tensor, list[Any]]]
"""(input_ids, states) → (logits, states after them)"""


class Compared(NamedTuple):
    """What is found of a model.

    Attributes:
        error: the largest difference of a logit, relative to the largest logit
        prefill: tokens of the prompt per second, over those of our `Decoder`
        decode: tokens behind it per second, over those of our `Decoder`
    """

    error: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Comparison:
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
    def compare(self, model: FastWeightsForCausalLM, call: Call) -> Compared:
        """What is found of an engine that reads tokens by `call`."""
        ids = torch.randint(VOCABULARY, (1, self.prompt + self.decoded))
        ours = model(input_ids=ids, use_cache=False).logits
        states = Program(model).layout.empty()
        theirs = torch.cat(list(self._read(call, ids, states)), 1)
        error = float((theirs - ours).abs().max() / ours.abs().max())
        prefill, decode = zip(*self._ratios(model, call, ids, states), strict=True)
        return Compared(error, median(prefill), median(decode))

    def _pieces(self, ids: Tensor) -> list[Tensor]:
        return [ids[:, : self.prompt], *ids[:, self.prompt :].split(1, 1)]

    def _read(self, call: Call, ids: Tensor, states: list[Any]) -> Iterator[Tensor]:
        """Logits after the prompt, and after every token behind it."""
        for piece in self._pieces(ids):
            logits, states = call(piece, states)
            yield logits

    def _ratios(
        self, model: FastWeightsForCausalLM, call: Call, ids: Tensor, states: list[Any]
    ) -> Iterator[tuple[float, float]]:
        """Our seconds over the engine's, of the prompt and of the tokens behind it."""
        for _ in range(self.rounds):
            theirs = _seconds(self._read(call, ids, states))
            ours = _seconds(_decode(Decoder(model), self._pieces(ids)))
            yield ours[0] / theirs[0], ours[1] / theirs[1]


def one_layer(mixer: str, width: int) -> FastWeightsForCausalLM:
    """A model of one layer of random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": 1}
    return FastWeightsForCausalLM(FastWeightsConfig(**sizes, mixers=[{"name": mixer}])).eval()


def _decode(decoder: Decoder, pieces: list[Tensor]) -> Iterator[Tensor]:
    prompt, *tokens = pieces
    yield decoder.read(prompt)
    for token in tokens:
        yield decoder.read_token(token[:, 0])


def _seconds(reading: Iterator[Any]) -> tuple[float, float]:
    """For the first piece, and for all others."""
    start = perf_counter()
    next(reading)
    first = perf_counter()
    for _ in reading:
        pass
    return first - start, perf_counter() - first
