"""The mask function that transformers calls for a linearized model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.transformers_seams import is_tracing, softmax_mask
from fastweights.recurrence.base import ShapeError, lazy_property
from fastweights.shapes import Mask, Segments


@dataclass(frozen=True, eq=False)
class ForwardMasks:
    """What one forward pass says of its tokens; masks are made when a layer asks for them.

    A linear layer wants to know which tokens are padding (`keep`) and where packed documents begin
    (`segments`), a softmax layer its own mask (`softmax`).

    Attributes:
        build: makes the mask that the softmax implementation wants.
        visible: (sequence, head, query, key) → whether the query sees the key, were there no
            padding.
        given: the call's ``attention_mask [b s+t]``, or None.
        plain: whether a token surely sees all those before it and no other.
        b: sequences.
        t: tokens of each.
        offset: tokens that the cache has seen.
        device: where the tokens are.
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
        softmax_mask(softmax),
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
