"""What a conversion costs: a linearized model beside its own softmax, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.linearize.convert.attach import branches
from fastweights.linearize.convert.modes import (
    AttentionCall,
    LinearOnly,
    Mode,
    Student,
    Teacher,
    WindowOnly,
    use_mode,
)
from fastweights.linearize.distill.adapt import kl, next_logits, teacher_logits
from fastweights.linearize.distill.transfer import attend_all, divergence, output_error
from fastweights.methods import evaluate
from fastweights.recurrence import WindowedLinear
from fastweights.runs.evaluation import evaluation_mode
from fastweights.shapes import Output
from fastweights.train.perplexity import PositionLoss

SOFTMAX, LINEAR = "softmax", "linear"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Of one mode: its loss by position, KL(softmax ‖ mode) in nats per token, and how often both
    choose one token.
    """

    loss: PositionLoss
    kl: float
    agreement: float

    def row(self) -> dict[str, float]:
        """For a table or a JSON file."""
        nats = {"perplexity": self.loss.perplexity, "nats_per_token": self.loss.mean}
        return {**nats, "kl": self.kl, "agreement": self.agreement}


def ablations(model: nn.Module) -> dict[str, Mode]:
    """The modes to judge: softmax, the branches as they are, and where they have a window, each
    side alone.
    """
    analogs = [branch.analog for branch in branches(model).values()]
    sides: dict[str, Mode] = {"window only": WindowOnly(), "linear only": LinearOnly()}
    both = all(analog.rule == "windowed" and analog.window > 0 for analog in analogs)
    return {SOFTMAX: Teacher(), LINEAR: Student(), **(sides if both else {})}


def compare_with_softmax(
    model: Any,
    batches: Iterable[Mapping[str, Tensor]],
    modes: Mapping[str, Mode],
    teacher: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
) -> dict[str, Comparison]:
    """Every mode on sequences of one length; every token but the first of each is predicted.

    Args:
        teacher: logits ``[b t-1 vocabulary]`` from a model's inputs; None: `teacher_logits` of
            the model itself
    """
    tallies = {name: _Totals() for name in modes}
    with evaluation_mode(model):
        for batch in batches:
            given = {name: x.to(model.device) for name, x in batch.items() if name != "labels"}
            wanted = teacher_logits(model, given) if teacher is None else teacher(given)
            for name, mode in modes.items():
                tallies[name].add(
                    wanted if isinstance(mode, Teacher) else _logits(model, given, mode),
                    wanted,
                    given,
                )
    return {name: tally.comparison() for name, tally in tallies.items()}


def _logits(model: nn.Module, given: Mapping[str, Tensor], mode: Mode) -> Tensor:
    with use_mode(model, mode):
        return next_logits(model, given)


class _DistanceMeter(Mode):
    """Softmax passed on, and meanwhile how far every layer is from it."""

    constant = False

    def __init__(self) -> None:
        self.found: list[tuple[float, float | None]] = []

    def attend(self, call: AttentionCall) -> Output:
        target, record = call.softmax(), call.record()
        error = output_error(call.branch.read(evaluate(record)[0]), target, call.keep)
        apart = divergence(record, call.keep) if isinstance(record, WindowedLinear) else None
        self.found.append((float(error), None if apart is None else float(apart)))
        return target


def distances(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Table 1's MSE and KLD, means over layers: ``error``, relative, of outputs, and
    ``divergence``, of weights.
    """
    mode = _DistanceMeter()
    with evaluation_mode(model):
        for batch in batches:
            attend_all(
                model,
                {name: x.to(model.device) for name, x in batch.items() if name != "labels"},
                mode,
            )
    errors, apart = [error for error, _ in mode.found], [d for _, d in mode.found if d is not None]
    named = {"error": errors, "divergence": apart}
    return {name: float(np.mean(values)) for name, values in named.items() if values}


class _Totals:
    """Sums over batches; a shorter last one is left out of the losses by position, which are of one
    length.
    """

    def __init__(self) -> None:
        self.sums: np.ndarray | None = None
        self.rows = 0
        self.kl = self.agreed = 0.0
        self.tokens = 0

    def add(self, logits: Tensor, wanted: Tensor, given: Mapping[str, Tensor]) -> None:
        targets = given["input_ids"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
            targets
        )
        sums = losses.double().sum(0).cpu().numpy()
        if self.sums is None:
            self.sums = np.zeros_like(sums)
        if len(sums) == len(self.sums):
            self.sums, self.rows = self.sums + sums, self.rows + len(targets)
        self.kl += float(kl(wanted.flatten(0, 1), logits.flatten(0, 1))) * targets.numel()
        self.agreed += float((logits.argmax(-1) == wanted.argmax(-1)).sum())
        self.tokens += targets.numel()

    def comparison(self) -> Comparison:
        if self.sums is None:
            raise ValueError("there is no text to judge a model by; give batches")
        counts = np.full(len(self.sums), self.rows)
        return Comparison(
            PositionLoss(self.sums, counts), self.kl / self.tokens, self.agreed / self.tokens
        )
