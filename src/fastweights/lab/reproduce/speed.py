"""Claims about time: training steps against length, decoding against batch and generated tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.generate import Decoder, stream
from fastweights.lab.bench.timing import Budget, Failure, clock_of, sample_in_turn
from fastweights.lab.reproduce.claim import Experiment, Trial, TrialContext
from fastweights.lab.reproduce.measures import Measure, Measures
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

Fields = Mapping[str, Any]
Function = Callable[[], object]


@dataclass(frozen=True)
class Models:
    """Language models that differ only in their mixers.

    Attributes:
        fields: Fields of the configuration of all models.
        mixers: The mixers by series.
        dtype: Dtype of weights and activations, by its name in torch.
        start: What parameters start at, by their last two names (``W_gamma.bias``), where an
            untrained model is not as fast as a trained one.
    """

    fields: Fields
    mixers: Mapping[str, Sequence[Fields]]
    dtype: str = "float32"
    start: Mapping[str, float] = field(default_factory=dict)

    def model(self, series: str, device: torch.device) -> FastWeightsForCausalLM:
        """Build the model of one series."""
        torch.manual_seed(0)
        fields: dict[str, Any] = {**self.fields, "mixers": list(map(dict, self.mixers[series]))}
        config = FastWeightsConfig(**fields)
        with torch.device(device):
            model = FastWeightsForCausalLM(config).to(getattr(torch, self.dtype))
        for name, parameter in model.named_parameters():
            if (value := self.start.get(".".join(name.split(".")[-2:]))) is not None:
                torch.nn.init.constant_(parameter, value)
        return model

    def each(self, device: torch.device) -> dict[str, FastWeightsForCausalLM]:
        """Build the models of all series, for evaluation."""
        return {series: self.model(series, device).eval() for series in self.mixers}

    def ids(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Draw ``[batch length]`` random tokens."""
        shape = (batch, length)
        return torch.randint(
            self.fields["vocab_size"], shape, generator=torch.Generator().manual_seed(0)
        ).to(device)


@dataclass(frozen=True)
class TrainingSteps(Trial):
    """A trial that times forward and backward passes of about `tokens` tokens, in sequences of
    `length`, one model after the other.

    It measures thousands of tokens per second, `repeats` times, and on a GPU the peak of memory in
    GB.
    """

    models: Models
    tokens: int
    length: int
    repeats: int

    @property
    def name(self) -> str:
        return f"training, {self.length} tokens"

    def run(self, context: TrialContext) -> list[Measure]:
        ids = self.models.ids(max(1, self.tokens // self.length), self.length, context.device)
        models = self.models.each(context.device).items()
        steps = {name: _step(model.train(), ids) for name, model in models}
        speeds = measure_rates(steps, ids.numel() / 1e3, self.length, self.repeats, context.device)
        return speeds + [
            one
            for name, step in steps.items()
            for one in _peak(name, step, self.length, context.device)
        ]


@dataclass(frozen=True)
class Generation(Trial):
    """A trial that times `batch` prompts of `prompt` tokens and `new` ones generated after each,
    one model after the other.

    It measures thousands of new tokens per second, `repeats` times.
    """

    models: Models
    batch: int
    prompt: int
    new: int
    repeats: int

    @property
    def name(self) -> str:
        return f"generation, batch {self.batch}"

    def run(self, context: TrialContext) -> list[Measure]:
        ids = self.models.ids(self.batch, self.prompt, context.device)
        models = self.models.each(context.device).items()
        runs = {name: partial(_generate, model, ids, self.new) for name, model in models}
        return measure_rates(
            runs, self.batch * self.new / 1e3, self.batch, self.repeats, context.device
        )


@dataclass(frozen=True)
class Token(Trial):
    """A trial that times one token of `batch` sequences after `context` tokens, one model after the
    other.

    It measures tokens per millisecond, `repeats` times.
    """

    models: Models
    batch: int
    context: int
    repeats: int

    @property
    def name(self) -> str:
        return f"one token after {self.context}"

    def run(self, context: TrialContext) -> list[Measure]:
        ids = self.models.ids(self.batch, self.context, context.device)
        models = self.models.each(context.device).items()
        runs = {name: _next(model, ids) for name, model in models}
        speeds = measure_rates(runs, self.batch / 1e3, self.context, self.repeats, context.device)
        return [replace(speed, quantity="decoding") for speed in speeds]


@dataclass(frozen=True)
class GenerationSegments(Trial):
    """A trial that times a generation of `tokens` tokens in so many `stretches`, the models in
    turn.

    In each it measures tokens per millisecond, at five quantiles, and MB of state.
    """

    models: Models
    tokens: int
    stretches: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, one after the other"

    def run(self, context: TrialContext) -> list[Measure]:
        models = self.models.each(context.device).items()
        decoders = {name: Decoder(model) for name, model in models}
        token = self.models.ids(1, 1, context.device)
        steps = {name: partial(one.read, token) for name, one in decoders.items()}
        clock, found, length = clock_of(context.device), [], self.tokens // self.stretches
        for end in range(length, self.tokens + 1, length):
            times = [
                {name: clock.sample(step, 1) for name, step in steps.items()} for _ in range(length)
            ]
            for name, decoder in decoders.items():
                found += _speeds(name, sorted(one[name] for one in times), end)
                found.append(Measure(name, decoder.cache.nbytes / 1e6, end, "state [MB]"))
        return found


def _speeds(series: str, times: Sequence[float], end: int) -> list[Measure]:
    """At five quantiles of the times, ascending."""
    chosen = [times[len(times) * part // 6] for part in range(1, 6)]
    return [
        Measure(series, 1e-3 / s, end, "along one sequence", seed) for seed, s in enumerate(chosen)
    ]


@dataclass(frozen=True)
class SpeedExperiment(Experiment):
    """An experiment of timing trials, with the ratios that its claim is about.

    Attributes:
        runs: The trials.
        kept: Series whose speed at their last place is divided by that at their first, as the
            quantity "kept".
        over: Pairs of series; the ratio of their speeds at their last common place is the series "a
            / b".
    """

    runs: tuple[Trial, ...]
    kept: tuple[str, ...] = ()
    over: tuple[tuple[str, str], ...] = ()

    def trials(self) -> Sequence[Trial]:
        return self.runs

    def summary(self, measures: Measures) -> Measures:
        found = list(measures)
        for quantity in [q for q in measures.quantities if "[" not in q]:
            rows = measures.of(quantity)
            for series in self.kept:
                if places := rows.places(series):
                    ends = (rows.sample(series, places[-1]), rows.sample(series, places[0]))
                    found += _quotient(series, ends, f"kept{quantity and f', {quantity}'}")
            for first, second in self.over:
                if places := rows.places(first):
                    pair = (rows.sample(first, places[-1]), rows.sample(second, places[-1]))
                    found += _quotient(
                        f"{first} / {second}", pair, f"quotient{quantity and f', {quantity}'}"
                    )
        return Measures(found)


def _quotient(series: str, pair: tuple[Any, Any], quantity: str) -> list[Measure]:
    above, below = pair
    if above is None or below is None:
        return []
    values = zip(above.values, below.values, strict=True)
    return [Measure(series, a / b, None, quantity, seed) for seed, (a, b) in enumerate(values)]


def measure_rates(
    functions: Mapping[str, Function], work: float, x: int, repeats: int, device: torch.device
) -> list[Measure]:
    """Measure `work` per second of each function, in `repeats` samples.

    All samples of one are taken before those of the next: in turn, a cache of softmax attention
    would push the states of the others out of the processor's memory.
    """
    budget = Budget(seconds=math.inf, runs=repeats)
    measures: list[Measure] = []
    for name, function in functions.items():
        found = sample_in_turn({name: function}, clock_of(device), budget)[name]
        if isinstance(found, Failure):
            raise RuntimeError(f"{name} could not be timed: {found.reason}")
        measures += [Measure(name, work / s, x, seed=seed) for seed, s in enumerate(found)]
    return measures


def _step(model: FastWeightsForCausalLM, ids: Tensor) -> Function:
    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def _peak(name: str, step: Function, length: int, device: torch.device) -> list[Measure]:
    if device.type != "cuda":
        return []
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return [
        Measure(name, torch.cuda.max_memory_allocated(device) / 1e9, length, "peak memory [GB]")
    ]


def _generate(model: FastWeightsForCausalLM, ids: Tensor, new: int) -> None:
    """`new` greedy tokens after ``ids [b t]``, which are read at once."""
    for _ in stream(model, ids, max_new_tokens=new, temperature=0, chunk=ids.shape[1]):
        pass


def _next(model: FastWeightsForCausalLM, ids: Tensor) -> Function:
    """Each call reads one more token: the context grows by one."""
    decoder = Decoder(model)
    decoder.read(ids)
    return partial(decoder.read, ids[:, :1])
