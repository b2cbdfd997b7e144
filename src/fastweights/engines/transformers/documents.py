"""Where documents begin in a packed row, in the words of transformers, and who is told of it.

Many models lose on their way to the mixers what a batch says of its documents, and `position_ids`
never get there. Therefore what `packing` finds where a model is entered is kept here while it
runs, and our functions look it up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastweights.methods import evaluate
from fastweights.recurrence import Decay, Delta, ShapeError
from fastweights.recurrence.selective import Selective

BOUNDS = ("cu_seqlens", "cu_seq_lens_q")
"""The names of the places where documents begin, and the end of the last."""
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""The attributes of modules with the function that runs a layer now and again in the backward."""


class _PackedRow(threading.local):
    def __init__(self) -> None:
        self.documents: Tensor | None = None


_row = _PackedRow()


def current_documents() -> Tensor | None:
    """The documents ``[b t]`` of the packed rows that a model of this thread is reading."""
    return _row.documents


@contextmanager
def reading(model: nn.Module, documents: Tensor) -> Iterator[None]:
    """While `model` reads packed rows; its checkpointed layers read them as such in the backward,
    too.

    Args:
        model: the model
        documents: the document of every token, ``[b t]``
    """
    checkpoints = [
        (part, name, vars(part)[name])
        for part in model.modules()
        for name in CHECKPOINTS
        if name in vars(part)
    ]
    for part, name, checkpoint in checkpoints:
        setattr(part, name, partial(_checkpoint, checkpoint, part, documents))
    before, _row.documents = _row.documents, documents
    try:
        yield
    finally:
        _row.documents = before
        for part, name, checkpoint in checkpoints:
            setattr(part, name, checkpoint)


def _checkpoint(
    checkpoint: Callable[..., Any],
    part: nn.Module,
    documents: Tensor,
    function: Callable[..., Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    """What `checkpoint` makes of a function of a part of a model, which has the documents whenever
    it runs, and so have the checkpointed layers inside.
    """

    def run(*arguments: Any, **named: Any) -> Any:
        with reading(part, documents):
            return function(*arguments, **named)

    return checkpoint(run, *arguments, **named)


def read_documents(stream: Tensor, named: dict[str, Any], *, led: bool = False) -> Tensor | None:
    """The document of every token, ``[b t]``, or None where nobody tells of documents: those of
    the model that is running, or else what a call names.

    Args:
        stream: whatever has a row per text and an entry per token, ``[b t …]``
        named: what the call was given by name: `seq_idx` ``[b t]``, or the bounds
            ``[documents + 1]`` of all rows, one behind the other, as `cu_seqlens` or
            `cu_seq_lens_q`
        led: whether inputs of before may lead the rows, of which `named` tells nothing; they
            belong to each row's first document

    Raises:
        ShapeError: if they are not for so many tokens
    """
    rows, tokens = stream.shape[:2]
    ids = current_documents()
    ids = named.get("seq_idx") if ids is None else ids
    if ids is None:
        bounds = next((named[name] for name in BOUNDS if named.get(name) is not None), None)
        if bounds is None:
            return None
        ids = number_documents(bounds, rows, tokens)
    before = tokens - ids.shape[1]
    if before < 0 or (before > 0 and not led) or len(ids) not in (1, rows):
        raise ShapeError(
            f"documents are given for {list(ids.shape)} tokens, but there are {[rows, tokens]};"
            " seq_idx is [batch, tokens] and cu_seqlens ends with the number of tokens"
        )
    return torch.cat([ids[:, :1].expand(-1, before), ids], dim=1).expand(rows, -1)


def evaluate_rows(
    record: Decay | Selective | Delta, named: dict[str, Any], state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o, the state behind each row) of a record, whose documents `read_documents` finds."""
    documents = read_documents(record.q, named)
    o, following = evaluate(record if documents is None else record.segments(documents), state)
    return o, cast(Tensor, following)


def number_documents(bounds: Tensor, rows: int, tokens: int) -> Tensor:
    """``[b t]`` of the bounds 0 … b t of all rows, one behind the other; of other bounds 0 … n,
    ``[1 n]``. A compiled graph cannot look, and takes them to be for b t.
    """
    total = rows * tokens if torch.compiler.is_compiling() else int(bounds[-1])
    places = torch.arange(total, device=bounds.device, dtype=bounds.dtype)
    ids = torch.bucketize(places, bounds[1:], right=True)
    return ids.view(rows, tokens) if total == rows * tokens else ids[None]
