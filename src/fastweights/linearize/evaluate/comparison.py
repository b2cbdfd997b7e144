"""Comparison of a linearized model with its own softmax, token by token."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.linearize.convert.attention import branches, use_mode
from fastweights.linearize.convert.modes import (
    AttentionCall,
    LinearOnly,
    Mode,
    OtherRecurrence,
    Student,
    Teacher,
    WindowOnly,
    has_window,
    require_window,
    set_window,
    without_log_scale,
)
from fastweights.linearize.evaluate.distances import divergence, output_error
from fastweights.linearize.evaluate.known import KnownText
from fastweights.linearize.evaluate.logits import (
    ReadOut,
    inputs_of,
    next_logits,
    read_out,
    rows_at_once,
    teacher_logits,
    without_adapters,
)
from fastweights.methods import evaluate
from fastweights.models.evaluation import evaluation_mode
from fastweights.recurrence import Decay, Recurrence, Windowed
from fastweights.recurrence.softmax import attend
from fastweights.shapes import Output
from fastweights.training.language.perplexity import PositionLoss

SOFTMAX, LINEAR = "softmax", "linear"
WINDOW_ONLY, LINEAR_ONLY = "window only", "linear only"
EQUAL_STATE = "window of equal state"
MODES = (SOFTMAX, LINEAR, EQUAL_STATE, WINDOW_ONLY, LINEAR_ONLY)
"""What a finished conversion is compared as, by the names in ``evaluation.json``."""


WEIGHTS = 1 << 20
"""Attention weights of a layer that are compared with softmax's, at most, unless told."""


def modes_in(evaluation: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the rows of ``evaluation.json`` that are of a mode of the model, by its name."""
    return {name: evaluation[name] for name in MODES if name in evaluation}


@dataclass(frozen=True, eq=False)
class ModeComparison:
    """The comparison of one mode of a linearized model with its softmax.

    Attributes:
        losses: ``[n t]`` float64, -log p of the t predicted tokens of n sequences, in nats.
        right: ``[n t]`` bool, whether the token has the highest probability.
        kl: KL(softmax ‖ mode) of the next token, in nats per token.
        agreement: The fraction of tokens for which both give the highest probability to the same
            token.
    """

    losses: np.ndarray
    right: np.ndarray
    kl: float
    agreement: float

    @cached_property
    def loss(self) -> PositionLoss:
        """The mode's own loss, by position."""
        sequences, tokens = self.losses.shape
        return PositionLoss(self.losses.sum(0), np.full(tokens, sequences))

    @property
    def accuracy(self) -> float:
        """The fraction of tokens that have the highest probability."""
        return float(self.right.mean())

    def loss_beside(self, softmax: ModeComparison) -> PositionLoss:
        """The mode's loss on what softmax has read: where that is more sequences than its own,
        softmax's with what the mode loses on these, by position."""
        own, beyond = len(self.losses), len(softmax.losses) - len(self.losses)
        more = (self.losses - softmax.losses[:own]).mean(0) * beyond
        total = self.losses.sum(0) + softmax.losses[own:].sum(0) + more
        return PositionLoss(total, np.full(len(total), own + beyond))

    def row(self, softmax: ModeComparison | None = None) -> dict[str, float]:
        """Return the numbers for a table or a JSON file, of what `softmax` has read; with the
        number of tokens where the mode has read fewer."""
        loss = self.loss if softmax is None else self.loss_beside(softmax)
        row = {"perplexity": loss.perplexity, "nats_per_token": loss.mean}
        fewer = softmax is not None and len(self.losses) < len(softmax.losses)
        read = {"tokens": self.losses.size} if fewer else {}
        return {**row, "kl": self.kl, "agreement": self.agreement, **read}


def ablations(model: nn.Module) -> dict[str, Mode]:
    """Return the modes that are compared, by name.

    These are softmax, the branches as they are and, where they have a window, each of their sides
    alone.
    """
    sides: dict[str, Mode] = {WINDOW_ONLY: WindowOnly(), LINEAR_ONLY: LinearOnly()}
    both = all(branch.config.has_window for branch in branches(model).values())
    return {SOFTMAX: Teacher(), LINEAR: Student(), **(sides if both else {})}


def compare_with_softmax(
    model: Any,
    batches: Iterable[Mapping[str, Tensor]],
    modes: Mapping[str, Mode],
    teacher: Callable[[Mapping[str, Tensor]], ReadOut] | None = None,
    known: KnownText | None = None,
    most: Mapping[str, int] = {},
) -> dict[str, ModeComparison]:
    """Compare modes of a linearized model with its softmax, token by token.

    Args:
        model: A linearized model, with adapters or without.
        batches: Inputs of the model, sequences of one length; every token but the first of each is
            predicted, or those after the places in ``logits_to_keep`` but the last. A shorter last
            batch counts for KL and agreement alone.
        modes: The modes by name, as `ablations` returns them.
        teacher: Reads a model's inputs as softmax does; None for the model itself, without its
            adapters.
        known: What is known of the text, and is not computed again; None for nothing.
        most: How many sequences a mode is read on, at least, by its name; all of them of others.

    Raises:
        ValueError: If there are no batches.
    """
    totals, known = {name: _Totals() for name in modes}, known or KnownText(0)
    with evaluation_mode(model):
        for batch in batches:
            given = inputs_of(batch, model.device)
            softmax = known.softmax(model, given) if teacher is None else teacher(given)
            found = {
                name: softmax if isinstance(mode, Teacher) else _read(model, given, mode, known)
                for name, mode in modes.items()
                if totals[name].sequences < most.get(name, math.inf)
            }
            tokens = softmax.states.shape[1] - 1
            _compare(softmax, found, given["input_ids"][:, -tokens:], totals)
    return {name: total.comparison() for name, total in totals.items()}


def _read(model: Any, given: Mapping[str, Tensor], mode: Mode, known: KnownText) -> ReadOut:
    untrained = isinstance(mode, StreamingSoftmax)
    with without_adapters(model) if untrained else nullcontext(), use_mode(model, mode):
        return (known.student if type(mode) is Student else read_out)(model, given)


def _compare(
    softmax: ReadOut, found: Mapping[str, ReadOut], targets: Tensor, totals: Mapping[str, _Totals]
) -> None:
    """Add what a batch gives, whose logits are made of a few tokens at a time."""
    rows = {name: read.states[:, :-1].flatten(0, 1) for name, read in found.items()}
    wanted, size = softmax.states[:, :-1].flatten(0, 1), rows_at_once(softmax.vocabulary)
    for start in range(0, len(wanted), size):
        span = slice(start, start + size)
        own = _Predictions.of(softmax.logits(wanted[span]), targets.flatten()[span])
        for name, read in found.items():
            theirs = own
            if read is not softmax:
                logits = read.logits(rows[name][span])
                theirs = _Predictions.of(logits, targets.flatten()[span])
            totals[name].add(theirs, own, targets.flatten()[span])
    for name in found:
        totals[name].end(targets.shape)


class StreamingSoftmax(Mode):
    """StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): the softmax model's own attention to the
    first tokens and to the last, of which nothing is trained.

    Args:
        tokens: How many tokens each layer keeps, by its number, of which the first `SINKS` are
            sinks.
    """

    constant = False

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self.tokens = tokens

    def attend(self, call: AttentionCall) -> Output:
        q, k, v = call.q, call.k, call.v
        tokens = self.tokens[call.layer]
        sinks, softcap = min(SINKS, tokens - 1), call.branch.attention.softcap
        continues, plain = k.shape[1] > q.shape[1], softcap is None and call.segments is None
        if plain and (continues or call.keep is None):
            return _attend_at_once(call, tokens - sinks, sinks)
        if continues:
            raise ValueError(
                f"layer {call.layer} has a soft cap or packed documents, with which StreamingLLM"
                " goes on from no cache; read the whole text at once, with use_cache=False"
            )
        nothing = q.new_zeros(*q.shape[:3], 1)
        # of a rule in which nothing is written: window and sinks alone
        record = Windowed(
            Decay(nothing, nothing, v.new_zeros(*q.shape[:3], v.shape[-1]), None),
            call.branch.softmax_queries(q),
            k,
            v,
            mix=torch.ones_like(nothing),
            window=tokens - sinks,
            sinks=sinks,
            softcap=softcap,
        )
        record = record if call.keep is None else record.keep(call.keep)
        record = record if call.segments is None else record.segments(call.segments)
        return evaluate(record)[0].to(v.dtype)


def _attend_at_once(call: AttentionCall, window: int, sinks: int) -> Output:
    """To a text without other documents, or to what follows one, by torch's fused attention."""
    keys = torch.arange(call.k.shape[1], device=call.q.device)
    distance = keys[-call.q.shape[1] :, None] - keys
    seen = (distance >= 0) & ((distance < window) | (keys < sinks))
    if call.kept is not None:
        kept = call.kept[:, None, None].bool()
        # the sinks are the first tokens that are no padding
        seen = (distance >= 0) & kept & ((distance < window) | (kept.cumsum(-1) <= sinks))
    streams = call.branch.softmax_queries(call.q), call.k, call.v
    q, k, v = (stream.to(call.v.dtype).transpose(1, 2) for stream in streams)
    return attend(q, k, v, seen, grouped=True).transpose(1, 2)


SINKS = 4
"""First tokens that StreamingLLM keeps."""


class FullWindow(OtherRecurrence):
    """A windowed layer whose window covers all tokens.

    In a correct conversion its output equals softmax's.
    """

    def replacement(self, record: Recurrence) -> Recurrence:
        window = require_window(record, type(self).__name__).map_groups(without_log_scale)
        return set_window(window, len(record))


@torch.no_grad()
def difference_with_full_window(model: Any, inputs: Mapping[str, Tensor]) -> float:
    """Test a conversion: compare softmax with windows as long as the text, which should be equal.

    Returns:
        The largest difference between their logits, over the largest logit.
    """
    with evaluation_mode(model):
        wanted = teacher_logits(model, inputs)
        with use_mode(model, FullWindow()):
            found = next_logits(model, inputs)
    return float((found - wanted).abs().max() / wanted.abs().max())


class DistanceMeter(Mode):
    """A mode that passes the softmax output on and measures each layer's distance from it (LoLCATs,
    Table 1).

    Args:
        weights: How many attention weights of a layer are compared, at most: there are as many as
            pairs of tokens. Sequences beyond have an ``error`` alone.

    Attributes:
        errors: Every layer's relative squared error in every call.
        last: Those of the last call, by layer.
    """

    constant = False

    def __init__(self, weights: float = WEIGHTS) -> None:
        self.errors, self.divergences = list[float](), list[float]()
        self.left = defaultdict[int, float](lambda: weights)
        self.last: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Output:
        target, record = call.softmax(), call.record()
        self.last[call.layer] = output_error(
            call.branch.read(evaluate(record)[0]), target, call.keep
        )
        self.errors.append(float(self.last[call.layer]))
        if has_window(record):
            b, t, h = record.shape
            self.left[call.layer] -= b * h * t * t
            if self.left[call.layer] >= 0:
                self.divergences.append(float(divergence(record, call.keep)))
        return target

    def asks(self, model: nn.Module, ids: Tensor) -> bool:
        """Whether attention weights of these tokens ``[b t]`` would be compared."""
        b, t = ids.shape
        return any(
            self.left[layer] >= b * branch.attention.heads * t * t
            for layer, branch in branches(model).items()
        )

    def distances(self) -> dict[str, float]:
        """Return ``error``, the relative squared error of outputs, and ``divergence``, KL(softmax ‖
        linear) of attention weights in nats, for layers that have such weights: means over layers
        and calls."""
        named = {"error": self.errors, "divergence": self.divergences}
        return {name: float(np.mean(values)) for name, values in named.items() if values}


class _Predictions(NamedTuple):
    """log p ``[n vocabulary]`` of the next token, that of the targets and the likeliest token
    ``[n]``."""

    log_p: Tensor
    of_targets: Tensor
    likeliest: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> Self:
        """Of logits, in whose memory log p is then."""
        logits, likeliest = logits.contiguous(), torch.empty_like(targets)
        for rows, first in _slices(logits, likeliest):
            first.copy_(rows.argmax(-1))
            rows.copy_(rows.log_softmax(-1))
        return cls(logits, logits.gather(-1, targets[..., None])[..., 0], likeliest)

    def kl(self, other: _Predictions) -> float:
        """The sum of KL(self ‖ other) over the tokens."""
        if self is other:
            return 0.0
        return sum(
            float(F.kl_div(theirs, own, reduction="sum", log_target=True))
            for own, theirs in _slices(self.log_p, other.log_p)
        )


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same few rows of ``[n …]``, which stay in a processor's cache."""
    size = -(-rows_at_once(tensors[0].shape[-1]) // CACHED)
    return zip(*(s.split(size) for s in tensors), strict=True)


CACHED = 4
"""Parts of the logits that are held at once, in which they are compared."""


class _Totals:
    """What batches give."""

    def __init__(self) -> None:
        self.losses: list[np.ndarray] = []
        self.right: list[np.ndarray] = []
        self.rows = list[tuple[Tensor, Tensor]]()
        self.kl = self.agreed = 0.0
        self.tokens = 0

    def add(self, found: _Predictions, softmax: _Predictions, targets: Tensor) -> None:
        self.kl += softmax.kl(found)
        self.agreed += float((found.likeliest == softmax.likeliest).sum())
        self.tokens += targets.numel()
        self.rows.append((found.of_targets.neg().double(), found.likeliest == targets))

    @property
    def sequences(self) -> int:
        """How many there are so far."""
        return sum(map(len, self.losses))

    def end(self, shape: torch.Size) -> None:
        """End a batch, whose targets are ``[b t]``."""
        losses, right = (torch.cat(part).view(shape) for part in zip(*self.rows, strict=True))
        self.rows.clear()
        if not self.losses or shape[1] == self.losses[0].shape[1]:
            self.losses.append(losses.cpu().numpy())
            self.right.append(right.cpu().numpy())

    def comparison(self) -> ModeComparison:
        if not self.losses:
            raise ValueError("no batches were given to compare a model on; pass at least one")
        return ModeComparison(
            np.concatenate(self.losses),
            np.concatenate(self.right),
            self.kl / self.tokens,
            self.agreed / self.tokens,
        )
