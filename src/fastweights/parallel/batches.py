"""A batch of whole sequences, divided among the processes that read them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fastweights.models.loss import IGNORE_INDEX
from fastweights.models.packing import Boundaries, segments_of
from fastweights.parallel.slices import Slices
from fastweights.recurrence import ShapeError

SLICED = ("input_ids", "inputs_embeds")


def divide(batch: Mapping[str, Any], group: ProcessGroup | DeviceMesh) -> dict[str, Any]:
    """What a language model is given on this process, of a batch that all of `group` have alike.

    The losses of all processes then sum to the mean loss over all labels of the batch, and so do
    the gradients; a library that averages gradients over the group needs the loss times the
    group's size.

    Args:
        batch: `input_ids` ``[b t]`` or `inputs_embeds` ``[b t d]`` of whole sequences; `labels`,
            aligned with them; `attention_mask`; what tells packed documents apart: `segments`,
            `position_ids` or one of `Boundaries`.
        group: Its processes take slices of time in the order of their numbers.

    Returns:
        The same names cut to this process's slice, with `targets` and `num_items_in_batch` in
        place of `labels`, and `segments` in place of all that tells documents apart.

    Raises:
        ShapeError: t is no multiple of the number of processes.
        ValueError: There are no tokens, or an argument does not fit them.
        TypeError: A name in `batch` is not known.
    """
    slices, rest = Slices.of(group), dict(batch)
    tokens = {name: rest.pop(name) for name in SLICED if rest.get(name) is not None}
    if not tokens:
        raise ValueError(f"the batch has neither {' nor '.join(SLICED)}, only {sorted(batch)}")
    whole = {**tokens, **_of_tokens(next(iter(tokens.values())), rest)}
    span = _span(slices, next(iter(tokens.values())).shape[1])
    return {
        name: value[:, span].contiguous()
        if isinstance(value, Tensor) and value.dim() > 1
        else value
        for name, value in whole.items()
    }


def _of_tokens(tokens: Tensor, rest: dict[str, Any]) -> dict[str, Any]:
    """What of a batch belongs to its tokens one by one, documents numbered and labels shifted."""
    x = tokens if tokens.dim() == 3 else tokens[..., None]
    mask, labels = rest.pop("attention_mask", None), rest.pop("labels", None)
    segments, position_ids = rest.pop("segments", None), rest.pop("position_ids", None)
    keep = None if mask is None else mask.bool()
    boundaries: Boundaries = {name: value for name, value in rest.items() if value is not None}  # pyrefly: ignore[bad-assignment]
    found = {
        "attention_mask": mask,
        "segments": segments_of(x, keep, segments, position_ids, boundaries),
    }
    if labels is not None:
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        found |= {
            "targets": targets,
            "num_items_in_batch": int((targets != IGNORE_INDEX).sum().clamp(min=1)),
        }
    return {name: value for name, value in found.items() if value is not None}


def _span(slices: Slices, length: int) -> slice:
    size, rest = divmod(length, slices.count)
    if rest:
        raise ShapeError(
            f"sequences of {length} tokens cannot be divided among {slices.count} processes in"
            f" equal slices; cut them to {size * slices.count} tokens, or pad them to"
            f" {(size + 1) * slices.count} (attention_mask 0, labels {IGNORE_INDEX})"
        )
    return slice(slices.index * size, (slices.index + 1) * size)


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup | DeviceMesh) -> None:
    """Sum gradients over the processes of `group`, where no library does.

    Every process has a gradient of the same parameters: those that read slices of one sequence run
    the same graph.
    """
    processes = Slices.of(group).group
    for parameter in parameters:
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad, group=processes)
