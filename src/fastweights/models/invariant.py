"""Batch invariance: logits that have the same bits whatever else is in the batch, and however the
text is read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastweights.models.cache import CountingCache
from fastweights.models.cache_names import CACHES, take_cache

ALIGNMENT = 64
"""Bytes of a cache line: by a weight's place in it, libraries choose the order of their sums."""


@dataclass
class RowCache:
    """What has been read of one sequence.

    Attributes:
        cache: of the model, for this sequence alone; None before the first token
        tokens: how many have been read, padding not counted
    """

    cache: Any = None
    tokens: int = 0


class RowCaches(CountingCache):
    """What a model has read inside `batch_invariant`: a cache of its own for every sequence.

    Attributes:
        rows: the sequences
        columns: how many tokens of each have been given, padding counted
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.rows = [RowCache() for _ in range(batch)]
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back: they cannot."""
        return False

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = [copy.deepcopy(self.rows[i]) for i in indices.tolist()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take back tokens.

        Raises:
            NotImplementedError: there are tokens to take back
        """
        if tokens_to_remove:
            raise NotImplementedError(
                "inside batch_invariant the last tokens cannot be taken back; generate without an"
                " assistant, or copy.deepcopy the cache before reading them"
            )

    def __repr__(self) -> str:
        return f"RowCaches({len(self.rows)} sequences, {self.columns} tokens)"


@contextmanager
def batch_invariant(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, the logits of a sequence have the same bits whatever else is in the batch,
    and whether its tokens came as one prompt, in pieces or one by one.

    Libraries choose the order of their sums by the number of rows, kernels by the number of tokens.
    Here every token of every sequence is read alone, so that the shapes of all operations are the
    same in every batch: reading costs as much as decoding sequence by sequence. The gradients of
    the logits are those of the model's own evaluation, equal up to rounding, which is computed
    beside.

    The model's calls, `generate` (greedy, sampled, beams) and `fastweights.stream` are covered, on
    one device with a fixed number of threads. Weights that begin inside a cache line, as those of
    a mapped file do, are moved, since the order of sums depends on it. Tokens are read as in
    evaluation mode, without dropout, whatever the model's mode.

    Args:
        model: a causal language model of transformers' interface that keeps a cache

    Raises:
        TypeError: if the model's forward takes no cache, or no token ids
        ValueError: by calls inside: for arguments other than token ids, padding, a cache and what
            is to be returned, documents in one row, a cache that was not made inside the block, or
            one where gradients are followed
    """
    reader = _RowReader.of(model)
    with torch.no_grad():
        _align(model)
    owned = "forward" in vars(model)
    model.forward = wraps(reader.forward)(partial(_read, reader))
    try:
        yield
    finally:
        if owned:
            model.forward = reader.forward
        else:
            del model.forward


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log probability of every token under the logits before it, each computed by itself, so
    that its bits do not depend on the others.

    Args:
        logits: ``[b t vocab]``
        tokens: ``[b t]``, those that the logits are about

    Returns:
        ``[b t]``, in float32 or wider
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    vectors = wide.reshape(-1, wide.shape[-1])
    each = [
        vector.clone().log_softmax(-1)[token]
        for vector, token in zip(vectors, tokens.flatten(), strict=True)
    ]
    return torch.stack(each).view(tokens.shape)


@dataclass(frozen=True)
class _RowReader:
    """A model as it was before.

    Attributes:
        model: whose forward is replaced
        forward: its own
        cache: what it calls its cache
        arguments: what its forward takes by name
    """

    model: nn.Module
    forward: Callable[..., Any]
    cache: str
    arguments: frozenset[str]

    @classmethod
    def of(cls, model: PreTrainedModel) -> _RowReader:
        arguments = frozenset(inspect.signature(model.forward).parameters)
        cache = next((name for name in CACHES if name in arguments), None)
        if cache is None or "input_ids" not in arguments:
            raise TypeError(
                f"batch_invariant reads token by token from a cache, but the forward of a"
                f" {type(model).__name__} takes no {' or '.join(CACHES)} beside input_ids"
            )
        return cls(model, model.forward, cache, arguments)

    @torch.no_grad()
    def read_token(self, token: Tensor, row: RowCache) -> Any:
        """What the model returns of one token ``[1 1]`` behind those of the row."""
        given: dict[str, Any] = {self.cache: row.cache, "use_cache": True, "return_dict": True}
        if "position_ids" in self.arguments:
            given["position_ids"] = torch.full_like(token, row.tokens)
        found = self.forward(input_ids=token, **given)
        row.cache = getattr(found, self.cache)
        row.tokens += 1
        return found


class _WithGradients(torch.autograd.Function):
    """The first of two tensors, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, followed: Tensor) -> Tensor:  # noqa: ARG004
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return None, grads[0]


def _read(reader: _RowReader, input_ids: Tensor | None = None, **given: Any) -> Any:
    """The forward of a model inside `batch_invariant`."""
    mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
    earlier, use_cache = take_cache(given), given.pop("use_cache", None)
    kept = given.pop("logits_to_keep", None) or 0
    ids = _require_ids(input_ids, given)
    caches = _caches_of(earlier, len(ids))
    followed = None
    if torch.is_grad_enabled():
        _require_no_past(caches)
        asked = {"attention_mask": mask, "position_ids": positions}
        asked = {name: value for name, value in asked.items() if value is not None}
        followed = reader.forward(input_ids=ids, use_cache=False, return_dict=True, **asked).logits
    present = _present(mask, ids)
    _require_positions(positions, present, caches.rows)
    with _evaluating(reader.model):
        output, logits = _read_rows(reader, ids, present, caches.rows)
    caches.columns += ids.shape[1]
    if followed is not None:
        logits = _WithGradients.apply(logits, followed)
    span = slice(-kept, None) if isinstance(kept, int) else kept
    returned = {} if use_cache is False else {reader.cache: caches}
    return output(logits=logits[:, span], **returned)


def _read_rows(
    reader: _RowReader, ids: Tensor, present: Tensor, rows: Sequence[RowCache]
) -> tuple[type, Tensor]:
    """The class of what the model returns, and the logits ``[b t vocab]``, zeros at padding."""
    read: dict[tuple[int, int], Tensor] = {}
    found: Any = None
    for i, j in present.nonzero().tolist():
        found = reader.read_token(ids[i : i + 1, j : j + 1].clone(), rows[i])
        read[i, j] = found.logits[0, -1]
    if found is None:
        raise ValueError("attention_mask: there is no token but padding")
    logits = found.logits.new_zeros(*ids.shape, found.logits.shape[-1])
    for place, vector in read.items():
        logits[place] = vector
    return type(found), logits


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, and what was before behind it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _require_ids(ids: Tensor | None, others: dict[str, Any]) -> Tensor:
    asked = sorted(name for name, value in others.items() if not _says_nothing(name, value))
    if ids is None or ids.ndim != 2 or asked:
        what = ", ".join(asked) if asked else "no input_ids [b t]"
        raise ValueError(
            f"batch_invariant reads token ids, with or without padding, and returns logits; {what}"
            " cannot be asked inside; compute a loss from the logits, give each document a row"
        )
    return ids


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an argument asks for what is done anyway."""
    return value is None or value is False or name in ("return_dict", "cache_position")


def _caches_of(earlier: Any, batch: int) -> RowCaches:
    """Those given, or new ones for an empty cache of another kind, as `generate` gives."""
    if isinstance(earlier, RowCaches):
        if len(earlier.rows) != batch:
            raise ValueError(
                f"this cache holds {len(earlier.rows)} sequences, the input {batch}; use"
                " batch_repeat_interleave or batch_select_indices on the cache"
            )
        return earlier
    if earlier is not None and earlier.get_seq_length() > 0:
        raise ValueError(
            "batch_invariant: this cache was filled outside the block; read its text again inside,"
            " and go on from the cache that each call returns"
        )
    if earlier is not None:
        _require_unused(earlier)
    return RowCaches(batch)


def _require_unused(cache: Any) -> None:
    """Raise where an empty cache comes a second time: what was read since is in another one."""
    if getattr(cache, "_replaced", False):
        raise ValueError(
            "batch_invariant: this cache was replaced by the one that the last call returned; go on"
            " from that"
        )
    cache._replaced = True


def _require_no_past(caches: RowCaches) -> None:
    if caches.columns:
        raise ValueError(
            "batch_invariant follows gradients through whole texts only; read on from a cache"
            " under torch.no_grad()"
        )


def _present(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Which tokens ``[b t]`` are none of padding."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if mask.ndim != 2 or len(mask) != len(ids) or mask.shape[1] < ids.shape[1]:
        raise ValueError(
            f"attention_mask {list(mask.shape)} does not fit input_ids {list(ids.shape)}; inside"
            " batch_invariant it is [b t], or [b s+t] with the s tokens that the cache has seen"
        )
    return mask[:, -ids.shape[1] :].bool()


def _require_positions(positions: Tensor | None, present: Tensor, rows: Sequence[RowCache]) -> None:
    """Raise unless positions are the count of a row's tokens: others tell of documents."""
    if positions is None:
        return
    before = torch.tensor([row.tokens for row in rows], device=present.device)[:, None]
    counted = before + present.cumsum(1) - 1
    if not bool(((positions == counted) | ~present).all()):
        raise ValueError(
            "batch_invariant: position_ids do not count the tokens of a row up from 0, padding left"
            " out; give each document a row of its own"
        )


def _align(model: nn.Module) -> None:
    """Have all weights begin where a cache line does."""
    for weight in (*model.parameters(), *model.buffers()):
        if weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()
