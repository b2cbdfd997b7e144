"""The attention and mask functions that transformers calls for a linearized model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.import_utils import is_tracing

from fastweights.linearize.branch import LinearBranch
from fastweights.linearize.cache import state_layer
from fastweights.linearize.errors import CannotLinearize
from fastweights.linearize.modes import LINEAR, Call
from fastweights.recurrence.base import ShapeError
from fastweights.shapes import Mask, Segments

SOFTMAX = ("sdpa", "eager")
"""The implementations of softmax attention that unconverted layers and teachers can use."""


def implementation_name(softmax: str) -> str:
    """What transformers knows a linearized model's attention by: the name also says what its softmax layers use."""
    return f"linearized_{softmax}"


class Masks:
    """What a forward pass says of its tokens, to linear layers and, if one asks, to softmax layers.

    keep      ``[b t]``, False for padding; None if there is none
    segments  ``[b t]``, the documents that are packed into each sequence; None if there is one
    softmax   the mask that the softmax implementation wants
    """

    def __init__(self, keep: Mask | None, segments: Segments | None, build: Callable[[], Any]) -> None:
        self.keep, self.segments, self._build = keep, segments, build

    @cached_property
    def softmax(self) -> Any:
        return self._build()


def make_masks(
    softmax: str,
    *,
    batch_size: int,
    q_length: int,
    q_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    use_vmap: bool,
    device: torch.device,
    **options: Any,
) -> Masks:
    """The mask function: `softmax` names the implementation whose masks the softmax layers get."""
    if use_vmap:
        raise CannotLinearize(
            "this model's mask",
            "it lets tokens see others than those before them, or not all of those",
            "convert a model whose layers are causal",
        )
    shape = {"batch_size": batch_size, "q_length": q_length, "q_offset": q_offset, "mask_function": mask_function}
    flags = {"allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap, "device": device}
    given = AttentionMaskInterface()[softmax]
    build = partial(given, **shape, **flags, **options, attention_mask=attention_mask)
    segments = None if allow_is_causal_skip else _segments(mask_function, batch_size, q_offset, q_length, device)
    return Masks(_kept(attention_mask, q_offset, q_length), segments, build)


def _kept(attention_mask: Tensor | None, offset: int, length: int) -> Mask | None:
    if attention_mask is None:
        return None
    keep = attention_mask[:, offset : offset + length]
    if keep.shape[1] != length:
        raise ShapeError(
            f"attention_mask has {attention_mask.shape[1]} columns, must be one for each of the {offset} tokens in "
            f"the cache and of the {length} given"
        )
    return None if not is_tracing(keep) and bool(keep.all()) else keep.bool()


def _segments(visible: Callable[..., Tensor], b: int, offset: int, length: int, device: torch.device) -> Segments:
    """Where a token does not see the one before it, a document begins."""
    rows = torch.arange(b, device=device)[:, None]
    tokens = offset + torch.arange(length, device=device)[None].expand(b, -1)
    before = visible(rows, rows * 0, tokens, (tokens - 1).clamp(min=0))
    return (~before).expand(b, length).cumsum(1)


def attend(
    softmax: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function: q ``[b h t k]``, k and v ``[b g t ·]`` → o ``[b t h v]``."""
    branch = getattr(module, "linear_branch", None)
    masks = attention_mask if isinstance(attention_mask, Masks) else None
    given = partial(_softmax(softmax, module), module, query, key, value, **options)
    if branch is None:
        return given(attention_mask if masks is None else masks.softmax)
    if masks is None:
        raise CannotLinearize(
            f"layer {module.layer_idx} with a mask of shape {_shape(attention_mask)}",
            "a state cannot tell which token sees which",
            "pass attention_mask [batch, time], 1 for tokens and 0 for padding, or none",
        )
    memory, module.linear_memory = module.linear_memory, None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call = Call(
        layer=module.layer_idx,
        branch=branch,
        q=q,
        k=k,
        v=v,
        keep=masks.keep,
        record=lambda: branch.record(q, k, v, masks.keep, masks.segments),
        linear=lambda: branch(q, k, v, masks.keep, masks.segments, module.linear_mode, memory),
        softmax=lambda: given(masks.softmax)[0],
    )
    return module.linear_mode.attend(call), None


def _shape(mask: Any) -> Any:
    return list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__


def _softmax(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A model's file has an eager attention of its own."""
    eager = sys.modules[type(module).__module__].__dict__.get("eager_attention_forward")
    return AttentionInterface().get_interface(name, eager)  # type: ignore[arg-type]


def take_memory(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The pre-hook of a converted attention: finds its layer in the cache, which its attention function is not given."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    constant = cache is not None and module.linear_mode.constant
    module.linear_memory = state_layer(cache, module.layer_idx) if constant else None


def convert(module: Any, branch: LinearBranch) -> None:
    """Give an attention its branch."""
    module.linear_branch = branch
    module.linear_mode = LINEAR
    module.linear_memory = None
    module.register_forward_pre_hook(take_memory, with_kwargs=True)


def converted(model: nn.Module) -> list[Any]:
    """The attentions of `model` that have a branch, in the order of its layers."""
    found: list[Any] = [module for module in model.modules() if "linear_branch" in module._modules]
    return sorted(found, key=lambda module: module.layer_idx)


for _name in SOFTMAX:
    AttentionInterface.register(implementation_name(_name), partial(attend, _name))
    AttentionMaskInterface.register(implementation_name(_name), partial(make_masks, _name))
