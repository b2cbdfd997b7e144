"""The logits of a converted model, and of the softmax model that it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import use_mode
from fastweights.linearize.convert.modes import Mode, Teacher
from fastweights.linearize.convert.transformers_seams import has_final_states, logits_of_states
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.data.documents import to_device
from fastweights.training.language.adapters import has_adapters


def inputs_of(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the inputs in a batch, which may have labels too, on a device."""
    return to_device({name: x for name, x in batch.items() if name != "labels"}, device)


def next_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits ``[b t-1 vocabulary]`` after all tokens but the last, in float32 or
    wider."""
    return upcast(model(**inputs, use_cache=False).logits[:, :-1])


@dataclass(frozen=True, eq=False)
class ReadOut:
    """What a model's logits are made of, so that never those of all tokens are held.

    Attributes:
        states: ``[b t ·]``: final hidden states, or the logits themselves where a model has no
            other way to them.
        vocabulary: How many logits each token has.
        logits: Computes those ``[n vocabulary]`` of rows ``[n ·]`` of them, in float32 or wider.
    """

    states: Tensor
    vocabulary: int
    logits: Callable[[Tensor], Tensor]

    def next_logits(self) -> Tensor:
        """Compute what the function `next_logits` does."""
        b = len(self.states)
        return self.logits(self.states.flatten(0, 1)).unflatten(0, (b, -1))[:, :-1]


def read_out(model: nn.Module, inputs: Mapping[str, Tensor]) -> ReadOut:
    """Compute what the logits of all tokens are made of, or of those in ``logits_to_keep``."""
    inside: Any = unwrap_adapters(model)
    if isinstance(model, FSDPModule) or not has_final_states(inside):
        logits = upcast(model(**inputs, use_cache=False).logits)
        return ReadOut(logits, logits.shape[-1], lambda rows: rows)
    given = {name: x for name, x in inputs.items() if name != "logits_to_keep"}
    states = inside.base_model(**given, use_cache=False).last_hidden_state
    return of_states(inside, states[:, inputs.get("logits_to_keep", slice(None))])


def of_states(model: PreTrainedModel, states: Tensor) -> ReadOut:
    """What the logits of final hidden states are made of."""
    vocabulary = model.config.get_text_config().vocab_size
    return ReadOut(states, vocabulary, lambda rows: upcast(logits_of_states(model, rows[None])[0]))


@torch.no_grad()
def teacher_logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute `next_logits` of the original model, as `read_teacher` reads it."""
    return read_teacher(model, inputs).next_logits()


def read_teacher(model: Any, inputs: Mapping[str, Tensor], mode: Mode = Teacher()) -> ReadOut:
    """Compute the `read_out` of the original model: with softmax attention, and without adapters.

    Args:
        model: The linearized model.
        inputs: Its inputs.
        mode: A mode that passes the softmax output on.
    """
    with evaluation_mode(model), without_adapters(model), use_mode(model, mode):
        return read_out(model, inputs)


def without_adapters(model: Any) -> AbstractContextManager[Any]:
    """Disable the adapters of `model`, if it has any, for the length of a block."""
    return model.disable_adapter() if has_adapters(model) else nullcontext()


def unwrap_adapters(model: Any) -> PreTrainedModel:
    """Return the model inside peft's wrapper, or `model` itself if it has none."""
    return model.get_base_model() if has_adapters(model) else model


LOGIT_BYTES, SLICE_BYTES = 1 << 27, 1 << 26
"""Of the logits that are computed with at once, beside those of a single sequence, and of those
that losses are computed of at once."""


def sequences_at_once(length: int, vocabulary: int) -> int:
    """Return how many sequences of `length` tokens have logits of `LOGIT_BYTES` together; 1 at
    least, and 4 at most."""
    return max(1, min(4, LOGIT_BYTES // (4 * length * vocabulary)))


def rows_at_once(vocabulary: int) -> int:
    """Return how many rows of logits have `SLICE_BYTES` together."""
    return max(1, SLICE_BYTES // (4 * vocabulary))


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the mean KL(teacher ‖ student) of logits ``[n vocabulary]`` over n, in nats."""
    return mean_over_rows(total_kl, student.shape[-1], teacher, student)


def total_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the sum of KL(teacher ‖ student) of logits ``[n vocabulary]`` over n, in nats."""
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )


def mean_over_rows(total: Callable[..., Tensor], vocabulary: int, *rows: Tensor) -> Tensor:
    """Compute a total over rows in slices, divided by the number of rows; 0 of none.

    What a slice computes is computed anew for its gradients, so that there are never several
    tensors as large as the logits of all rows.

    Args:
        total: Sums over rows, n of each of `rows`.
        vocabulary: How many logits a row has.
        rows: Tensors ``[n …]``.
    """
    slices = [*zip(*(s.split(rows_at_once(vocabulary)) for s in rows), strict=True)]
    count = max(len(rows[0]), 1)
    if len(slices) == 1:
        return total(*rows) / count
    totals = [checkpoint(total, *part, use_reentrant=False) for part in slices]
    return torch.stack(totals).sum() / count
