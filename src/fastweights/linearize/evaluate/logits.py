"""The logits of a converted model, and of the softmax model that it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import use_mode
from fastweights.linearize.convert.modes import Mode, Teacher
from fastweights.training.language.adapters import has_adapters


def next_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits ``[b t-1 vocabulary]`` after all tokens but the last, in float32 or
    wider."""
    return upcast(model(**inputs, use_cache=False).logits[:, :-1])


@torch.no_grad()
def teacher_logits(model: Any, inputs: Mapping[str, Tensor], mode: Mode = Teacher()) -> Tensor:
    """Compute `next_logits` of the original model: with softmax attention, and without adapters.

    Args:
        model: The linearized model.
        inputs: Its inputs.
        mode: A mode that passes the softmax output on.
    """
    training = model.training
    model.eval()
    try:
        with without_adapters(model), use_mode(model, mode):
            return next_logits(model, inputs)
    finally:
        model.train(training)


def without_adapters(model: Any) -> AbstractContextManager[Any]:
    """Disable the adapters of `model`, if it has any, for the length of a block."""
    return model.disable_adapter() if has_adapters(model) else nullcontext()


def unwrap_adapters(model: Any) -> PreTrainedModel:
    """Return the model inside peft's wrapper, or `model` itself if it has none."""
    return model.get_base_model() if has_adapters(model) else model


LOGIT_BYTES = 1 << 27
"""Of the logits that are computed with at once, beside those of a single sequence."""


def sequences_at_once(length: int, vocabulary: int) -> int:
    """Return how many sequences of `length` tokens have logits of `LOGIT_BYTES` together; 1 at
    least, and 4 at most."""
    return max(1, min(4, LOGIT_BYTES // (4 * length * vocabulary)))


def rows_at_once(logits: Tensor) -> int:
    """Return how many rows of ``logits [n vocabulary]`` have `LOGIT_BYTES` together."""
    return max(1, LOGIT_BYTES // (logits.element_size() * logits.shape[-1]))


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the mean KL(teacher ‖ student) of logits ``[n vocabulary]`` over n, in nats."""
    return mean_over_rows(_total_kl, student, teacher)


def _total_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean of -log p(target) of ``[n vocabulary]`` logits over n, in nats."""
    return mean_over_rows(partial(F.cross_entropy, reduction="sum"), logits, targets)


def mean_over_rows(total: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
    """Compute a total over rows in slices, divided by the number of rows; 0 of none.

    What a slice computes is computed anew for its gradients, so that there are never several
    tensors as large as the logits.

    Args:
        total: Sums over the rows of logits ``[n vocabulary]`` and of `others` ``[n …]``.
        logits: ``[n vocabulary]``
        others: Further arguments of `total`.
    """
    slices = [*zip(*(s.split(rows_at_once(logits)) for s in (logits, *others)), strict=True)]
    if len(slices) == 1:
        return total(logits, *others) / max(len(logits), 1)
    totals = [checkpoint(total, *part, use_reentrant=False) for part in slices]
    return torch.stack(totals).sum() / len(logits)


def positions_of(config: PretrainedConfig) -> int | None:
    """Return how many positions a model has; None for no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
