"""The judgement of a finished conversion, as ``evaluation.json`` holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fastweights.linearize.convert.rotary import positions_of
from fastweights.linearize.evaluate.comparison import (
    EQUAL_STATE,
    LINEAR,
    LINEAR_ONLY,
    SOFTMAX,
    ModeComparison,
    StreamingSoftmax,
    ablations,
    compare_with_softmax,
)
from fastweights.linearize.evaluate.generation import generate_samples
from fastweights.linearize.evaluate.known import KnownText
from fastweights.linearize.evaluate.logits import (
    read_out,
    sequences_at_once,
    unwrap_adapters,
)
from fastweights.linearize.evaluate.recall import choose_distances, measure_recall
from fastweights.linearize.evaluate.share import share_by_octave, share_of
from fastweights.training.data.documents import SequentialBatches, Stream
from fastweights.training.data.tokens import TokenText
from fastweights.training.loop.report import Follow, unfollowed

PROMPTS = 2
"""Texts that are continued."""
CONTINUED = 32
"""Tokens of a prompt, and of its continuation, at most."""


def evaluate_conversion(
    model: Any,
    original: PreTrainedModel | None,
    tokenizer: Any,
    validation: Stream,
    trained: int,
    room: int,
    equal_state: Mapping[int, int],
    follow: Follow = unfollowed,
    known: KnownText | None = None,
) -> tuple[dict[str, Any], dict[str, ModeComparison]]:
    """Judge a finished conversion beside its softmax.

    Args:
        model: The linearized model, with adapters or without.
        original: The softmax model; None for `model` itself, without its adapters.
        tokenizer: The tokenizer.
        validation: Held-out text.
        trained: Tokens of a sequence in training.
        room: Tokens that all further modes of the model may read together, and recall as well.
        equal_state: How many tokens' keys and values each layer could keep in place of its state.
        follow: Told of all that is measured.
        known: What is known of the validation text; None for nothing.

    Returns:
        What ``evaluation.json`` holds: a row for each mode; ``share`` with ``share_details``,
        ``share_by_position`` and, by distance, ``recall``; ``share_of_equal_state``, the share of
        what a window with sinks loses that takes as many bytes (StreamingLLM); and ``samples``. And
        the comparisons on the validation text, by mode.
    """
    modes = ablations(model)
    if original is None:  # whose attentions have their own weights still
        modes[EQUAL_STATE] = StreamingSoftmax(equal_state)
    teacher = None if original is None else torch.no_grad()(partial(read_out, original))
    config, text = unwrap_adapters(model).config, validation.text
    batches = comparison_batches(validation, config)
    compared = follow(batches, "comparing with softmax")
    further = [name for name in modes if name not in (SOFTMAX, LINEAR)]
    most = dict.fromkeys(further, sequences_of_further(room, len(further), validation.length))
    found = compare_with_softmax(model, compared, modes, teacher, known, most)
    share, reach = share_of(found), positions_of(config)
    of_share = {name: mode for name, mode in modes.items() if name != LINEAR_ONLY}
    distances, left_out = choose_distances(trained, reach, len(text), len(of_share), room)
    recall = [
        measure_recall(
            model,
            text,
            distance,
            of_share,
            trained=trained,
            most=own,
            teacher=teacher,
            follow=follow,
        ).row()
        for distance, own in distances.items()
    ]
    prompts = _prompts(validation.text, reach)
    samples = generate_samples(model, original, tokenizer, prompts, prompts.shape[1], follow)
    judged = {
        **{name: compared.row(found[SOFTMAX]) for name, compared in found.items()},
        "share": share.value,
        "share_details": share.row(),
        **_share_of_equal_state(found),
        "share_by_position": [
            {"from": first, "to": last, **part.row()}
            for (first, last), part in share_by_octave(found).items()
        ],
        "recall": recall,
        "recall_left_out": {str(distance): why for distance, why in left_out.items()},
        "samples": [asdict(sample) for sample in samples],
    }
    return judged, found


def sequences_of_further(room: int, modes: int, length: int) -> int:
    """Return how many sequences modes beside softmax and the model's own read, at most; 2 at least,
    of which a share has an interval."""
    return max(2, room // (max(modes, 1) * length))


def _share_of_equal_state(found: Mapping[str, ModeComparison]) -> dict[str, Any]:
    if EQUAL_STATE not in found:
        return {}
    return {"share_of_equal_state": share_of(found, EQUAL_STATE).row()}


def comparison_batches(validation: Stream, config: PretrainedConfig) -> SequentialBatches:
    """Return the validation text in batches whose logits have room in memory."""
    vocabulary = config.get_text_config().vocab_size
    return validation.sequential_batches(sequences_at_once(validation.length, vocabulary))


def _prompts(text: TokenText, reach: int | None) -> Tensor:
    """Prompts ``[n t]`` from a text, as long as leaves positions for as many tokens more."""
    size = min(CONTINUED, len(text), (reach or 2 * CONTINUED) // 2)
    starts = np.linspace(0, len(text) - size, PROMPTS + 2).astype(int)[1:-1]
    prompts = np.stack([text[start : start + size] for start in starts]).astype(np.int64)
    return torch.from_numpy(prompts)
