"""The logits of a converted model, and of the softmax model that it was."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import use_mode
from fastweights.linearize.convert.modes import Teacher
from fastweights.training.language.adapters import has_adapters


def next_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits ``[b t-1 vocabulary]`` after all tokens but the last, in float32 or
    wider."""
    return upcast(model(**inputs, use_cache=False).logits[:, :-1])


@torch.no_grad()
def teacher_logits(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute `next_logits` of the original model: with softmax attention, and without adapters."""
    training = model.training
    model.eval()
    try:
        with without_adapters(model), use_mode(model, Teacher()):
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
    total = F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )
    return total / max(len(student), 1)


def positions_of(config: PretrainedConfig) -> int | None:
    """Return how many positions a model has; None for no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
