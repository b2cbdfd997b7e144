"""The judgement of a finished conversion, as ``evaluation.json`` holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights.linearize.convert.modes import Mode
from fastweights.linearize.distill.adapt import next_logits, unwrap_adapters
from fastweights.linearize.distill.comparison import (
    Comparison,
    ablations,
    compare_with_softmax,
)
from fastweights.linearize.distill.context import ConversionContext
from fastweights.linearize.distill.generation import Sample, generate_samples
from fastweights.linearize.distill.memory import cache_memory, positions_of
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recall import distances_to, measure_recall, why_not
from fastweights.linearize.distill.share import share_by_octave, share_of

PROMPTS = 2
"""Texts that are continued."""
CONTINUED = 32
"""Tokens of a prompt, and of its continuation, at most."""


def evaluate_conversion(
    context: ConversionContext,
) -> tuple[dict[str, Any], dict[str, Comparison]]:
    """Judge a finished conversion beside its softmax.

    Returns:
        What ``evaluation.json`` holds: a row for each mode; ``share`` with ``share_details``,
        ``share_by_position`` and, by distance, ``recall``; ``memory``, ``break_even`` and
        ``samples``. And the comparisons on the validation text, by mode.
    """
    model, modes = context.model, ablations(context.model)
    original = None if context.has_own_teacher else context.teacher()()
    teacher = None if original is None else _logits_of(original)
    batches = context.validation.sequential_batches(4)
    found = compare_with_softmax(model, batches, modes, teacher)
    share = share_of(found)
    judged = {
        **{name: compared.row() for name, compared in found.items()},
        "share": share.value,
        "share_details": share.row(),
        "share_by_position": [
            {"from": first, "to": last, **part.row()}
            for (first, last), part in share_by_octave(found).items()
        ],
        **_recall(context, modes, teacher),
        **_memory(context),
        "samples": [asdict(sample) for sample in _samples(context, original)],
    }
    return judged, found


def _logits_of(original: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Of the model as it was, loaded a second time where its weights have changed."""
    return torch.no_grad()(lambda inputs: next_logits(original, inputs))


def _recall(
    context: ConversionContext,
    modes: Mapping[str, Mode],
    teacher: Callable[[Mapping[str, Tensor]], Tensor] | None,
) -> dict[str, Any]:
    text, length = context.validation.text, context.conversion.data.length
    reach = positions_of(unwrap_adapters(context.model).config)
    distances = distances_to(length)
    reasons = {distance: why_not(distance, reach, len(text)) for distance in distances}
    measured = [
        measure_recall(context.model, text, distance, modes, trained=length, teacher=teacher).row()
        for distance in distances
        if reasons[distance] is None
    ]
    left_out = {str(distance): why for distance, why in reasons.items() if why is not None}
    return {"recall": measured, "recall_left_out": left_out}


def _memory(context: ConversionContext) -> dict[str, Any]:
    conversion, planned, layers = context.conversion, context.plan, context.linear_layers()
    if len(layers) < len(planned.converted):
        planned = plan(conversion.model, conversion.recipe, layers=layers)
    found = cache_memory(conversion.model, planned, conversion.recipe.analog.window)
    return {"memory": [asdict(size) for size in found.sizes], "break_even": found.break_even}


def _samples(context: ConversionContext, original: PreTrainedModel | None) -> list[Sample]:
    """Prompts from the validation text, continued as far as the model has positions."""
    text, reach = context.validation.text, positions_of(unwrap_adapters(context.model).config)
    size = min(CONTINUED, len(text), (reach or 2 * CONTINUED) // 2)
    starts = np.linspace(0, len(text) - size, PROMPTS + 2).astype(int)[1:-1]
    prompts = np.stack([text[start : start + size] for start in starts]).astype(np.int64)
    return generate_samples(
        context.model, original, context.tokenizer, torch.from_numpy(prompts), size
    )
