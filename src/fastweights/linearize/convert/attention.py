"""The attention and mask functions that transformers calls for a linearized model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.import_utils import is_tracing

from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import ensure_state_layer, require_keys_and_values
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.modes import LINEAR, AttentionCall
from fastweights.recurrence.streams import ShapeError, lazy_property
from fastweights.shapes import Mask, Segments

SOFTMAX = ("sdpa", "eager")
"""The implementations of softmax attention that unconverted layers and teachers can use."""


def implementation_name(softmax: str) -> str:
    """What transformers knows a linearized model's attention by: the name also says what its
    softmax layers use.
    """
    return f"linearized_{softmax}"


@dataclass(frozen=True, eq=False)
class ForwardMasks:
    """What a forward pass says of its tokens, to linear layers and, if one asks, to softmax layers.

    build     makes the mask that the softmax implementation wants
    visible   (sequence, head, query, key) → whether the query sees the key, were there no padding
    given     the call's ``attention_mask [b s+t]``, or None
    plain     whether a token surely sees all those before it and no other
    b, t, offset  sequences, tokens, and how many the cache has seen
    """

    build: Callable[[], Any]
    visible: Callable[..., Tensor]
    given: Tensor | None
    plain: bool
    b: int
    t: int
    offset: int
    device: torch.device

    @lazy_property
    def softmax(self) -> Any:
        return self.build()

    @lazy_property
    def keep(self) -> Mask | None:
        """``[b t]``, False for padding; None if there is none."""
        if self.given is None:
            return None
        keep = self.given[:, self.offset : self.offset + self.t]
        if keep.shape[1] != self.t:
            raise ShapeError(
                f"attention_mask has {self.given.shape[1]} columns, must be one for each of the"
                f" {self.offset} tokens in the cache and of the {self.t} given"
            )
        return None if not is_tracing(keep) and bool(keep.all()) else keep.bool()

    @lazy_property
    def segments(self) -> Segments | None:
        """``[b t]``: where a token does not see the one before it, a packed document begins; None
        if there is one.
        """
        if self.plain or self.t == 1:
            return None
        ahead = self._sees(1)[:, :-1]
        if not is_tracing(ahead) and bool(ahead.any()):
            raise CannotLinearize(
                "this mask",
                "it lets tokens see some of those after them, a state only those before",
                "use the model for text alone, or convert one whose layers are causal",
            )
        return (~self._sees(-1)).cumsum(1)

    def _sees(self, step: int) -> Tensor:
        """``[b t]``: whether each token sees the one `step` further on."""
        rows = torch.arange(self.b, device=self.device)[:, None]
        tokens = self.offset + torch.arange(self.t, device=self.device)[None].expand(self.b, -1)
        others = (tokens + step).clamp(self.offset, self.offset + self.t - 1)
        return self.visible(rows, rows * 0, tokens, others).expand(self.b, self.t)


def make_masks(
    softmax: str,
    *,
    batch_size: int,
    q_length: int,
    q_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    device: torch.device,
    **options: Any,
) -> ForwardMasks:
    """The mask function: `softmax` names the implementation whose masks the softmax layers get."""
    build = partial(
        AttentionMaskInterface()[softmax],
        batch_size=batch_size,
        q_length=q_length,
        q_offset=q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        **options,
    )
    sizes = {"b": batch_size, "t": q_length, "offset": int(q_offset), "device": device}
    return ForwardMasks(build, mask_function, attention_mask, allow_is_causal_skip, **sizes)


def attend(
    softmax: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: q ``[b h t k]``, k and v ``[b g t ·]`` → o ``[b t h v]``."""
    branch = getattr(module, "linear_branch", None)
    masks = attention_mask if isinstance(attention_mask, ForwardMasks) else None
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
    keep, segments = masks.keep, masks.segments
    call = AttentionCall(
        layer=module.layer_idx,
        branch=branch,
        q=q,
        k=k,
        v=v,
        keep=keep,
        record=lambda: branch.record(q, k, v, keep, segments),
        linear=lambda replacement=None: branch(q, k, v, keep, segments, memory, replacement),
        softmax=lambda: given(masks.softmax)[0],
    )
    return module.linear_mode.attend(call).contiguous(), None


def _shape(mask: Any) -> Any:
    return list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__


def _softmax(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A model's file has an eager attention of its own."""
    eager = sys.modules[type(module).__module__].__dict__.get("eager_attention_forward")
    return AttentionInterface().get_interface(name, eager)  # type: ignore[arg-type]


def take_memory(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The pre-hook of a converted attention: finds the layer of the cache, which attention
    functions do not see.
    """
    module.linear_memory = None
    for cache in (x for x in (*args, *kwargs.values()) if isinstance(x, Cache)):
        if module.linear_mode.constant:
            module.linear_memory = ensure_state_layer(cache, module.layer_idx)
        else:
            require_keys_and_values(cache, module.layer_idx)


def attach_branch(module: Any, branch: LinearBranch) -> None:
    """Give an attention its branch."""
    module.linear_branch = branch
    module.linear_mode = LINEAR
    module.linear_memory = None
    module.register_forward_pre_hook(take_memory, with_kwargs=True)


def attentions_with_branch(model: nn.Module) -> list[Any]:
    """The attentions of `model` that have a branch, in the order of its layers."""
    found: list[Any] = [module for module in model.modules() if "linear_branch" in module._modules]
    return sorted(found, key=lambda module: module.layer_idx)


for _name in SOFTMAX:
    AttentionInterface.register(implementation_name(_name), partial(attend, _name))
    AttentionMaskInterface.register(implementation_name(_name), partial(make_masks, _name))
