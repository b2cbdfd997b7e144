"""Where packed rows enter a model: what a batch says of its documents is found, and kept apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.engines.transformers.documents import current_documents, read_documents, reading
from fastweights.engines.transformers.substitute import Switch
from fastweights.models.cache_names import CACHES

KEEP_APART = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling"),
    *("jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "zamba", "zamba2"),
)
"""The model folders whose linear layers read across tokens by our functions alone. In the others
(pooled indexers, dynamic and dilated convolutions) something else would mix documents.
"""
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
"""The functions of modelling files that make the masks of softmax layers."""
PICTURES = ("pixel_values", "pixel_values_videos")

Call = dict[str, Any]


def keep_documents_apart(
    theirs: Callable[..., Any], family: str, switch: Switch
) -> Callable[..., Any]:
    """The forward of a model, with packed rows kept apart.

    Args:
        theirs: transformers' forward
        family: the folder of its modelling file
        switch: off after `undo`
    """
    names = tuple(inspect.signature(theirs).parameters)[1:]

    @functools.wraps(theirs)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if not switch.on or current_documents() is not None:
            return theirs(self, *arguments, **named)
        call = dict(zip(names, arguments, strict=False)) | named
        documents = find_packing(call)
        if documents is None:
            return theirs(self, *arguments, **named)
        if family not in KEEP_APART:
            raise ValueError(
                f"packed documents are not read by {family} models, whose layers would mix them:"
                " give each document a row of its own, padded"
            )
        _refuse_cache(call)
        call["use_cache"] = False
        if "position_ids" in names and not _flash(self):
            _prepare_softmax(call, documents)
        with reading(self, documents):
            return theirs(self, **call)

    return forward


def find_packing(call: Call) -> Tensor | None:
    """The document of every token, ``[b t]``, or None where each row is one.

    `seq_idx` or `cu_seq_lens_q` say so, or else `position_ids` that do not go up by one from each
    token to the next: as transformers' softmax layers read them, only in a call without a cache
    and without padding.
    """
    text = next((call[n] for n in ("input_ids", "inputs_embeds") if call.get(n) is not None), None)
    if text is None:
        return None
    documents = read_documents(text, call)
    if documents is None and _fresh(call) and (positions := _text_positions(call)) is not None:
        jumps = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
        documents = jumps.cumsum(1).expand(len(text), -1)
    if documents is None or torch.compiler.is_compiling():
        return documents
    return None if bool((documents == documents[:, :1]).all()) else documents


def _fresh(call: Call) -> bool:
    """Whether position_ids may tell of documents, and there are any."""
    positions = call.get("position_ids")
    if positions is None or positions.shape[-1] == 1:
        return False
    return all(call.get(cache) is None for cache in CACHES) and _unpadded(call)


def _unpadded(call: Call) -> bool:
    """Whether no token is known to be padding; a compiled graph cannot look at a mask."""
    mask = call.get("attention_mask")
    if mask is None or torch.compiler.is_compiling():
        return mask is None
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())


def _text_positions(call: Call) -> Tensor | None:
    """``[b t]``, of models with pictures the first of their four rows of positions."""
    positions = call["position_ids"]
    if positions.dim() == 3 and len(positions) == 4:
        return positions[0]
    return positions if positions.dim() == 2 else None


def _refuse_cache(call: Call) -> None:
    if call.get("use_cache") or any(call.get(cache) is not None for cache in CACHES):
        raise ValueError(
            "a cache cannot keep the documents of a packed row apart: pass use_cache=False, or"
            " each document in a row of its own"
        )


def _flash(model: nn.Module) -> bool:
    """Whether softmax layers are told of documents by `cu_seq_lens_q` and `position_ids`."""
    config: Any = getattr(model, "config", None)
    return "flash" in (getattr(config, "_attn_implementation", None) or "")


def _prepare_softmax(call: Call, documents: Tensor) -> None:
    """Leave the mask of softmax layers to `mask_documents`, unless it is the caller's own, which
    has four axes.
    """
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return
    if not _unpadded(call):
        raise ValueError(
            "softmax layers do not see the documents of packed rows beside an attention_mask: pass"
            " none, and number padding as a document of its own"
        )
    call["attention_mask"] = None
    if call.get("position_ids") is None:
        _refuse_pictures(call)
        call["position_ids"] = count_positions(documents)


def mask_documents(theirs: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """A function that makes a mask of softmax layers, with the documents of packed rows, which
    transformers finds in position_ids if a model passes them on.
    """

    @functools.wraps(theirs)
    def function(*arguments: Any, **named: Any) -> Any:
        documents = current_documents() if switch.on else None
        if documents is not None and named.get("attention_mask") is None:
            named["position_ids"] = count_positions(documents)
        return theirs(*arguments, **named)

    return function


def _refuse_pictures(call: Call) -> None:
    if any(call.get(name) is not None for name in PICTURES):
        raise ValueError(
            "packed rows with pictures need position_ids, [4, batch, tokens]: those of the text,"
            " which begin anew with each document, and three of the pictures"
        )


def count_positions(documents: Tensor) -> Tensor:
    """``[b t]``: each token's place in its document."""
    tokens = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    return tokens - tokens.where(begins, tokens.new_zeros(())).cummax(1).values
