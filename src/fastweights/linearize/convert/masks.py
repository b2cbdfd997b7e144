"""The mask function that transformers calls for a linearized model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.linearize.convert.attention_layers import CannotLinearize
from fastweights.linearize.convert.transformers_seams import is_tracing, softmax_mask
from fastweights.recurrence.base import ShapeError, lazy_property
from fastweights.shapes import Mask, Segments


@dataclass(frozen=True, eq=False)
class ForwardMasks:
    """The masks of one forward pass, computed when a layer asks for them.

    A linear layer needs to know which tokens are padding (`keep`) and where packed documents begin
    (`segments`), a softmax layer its own mask (`softmax`).

    Attributes:
        build: Makes the mask for the softmax implementation.
        visible: Function (sequence, head, query, key) → whether the query sees the key, if there
            were no padding.
        given: The call's ``attention_mask [b s+t]``, or None.
        plain: Whether every token is known to see all tokens before it and no others.
        b: Number of sequences.
        t: Number of tokens of each.
        offset: Number of tokens that the cache has seen.
        device: Where the tokens are.
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
        """The number ``[b t]`` of each token's packed document; None if there is one document only.

        A document begins where a token does not see the one before it.
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

    def unusual(self, positions: Tensor | None) -> Tensor | None:
        """Return the positions ``[b t]`` of a call; None where they are known to count the tokens
        of one document without padding, from 0 on."""
        if positions is None or positions.dim() != 2:
            return None
        if is_tracing(positions) or positions.is_meta:
            return None if self.given is None and self.plain else positions
        if positions.device.type != "cpu" and self.t > 1:
            return positions  # to look at them is to wait for them
        answers = (found for asked, found in self._answers if asked is positions)
        if (answer := next(answers, None)) is None:
            answer = self._count_all_tokens(positions)
            self._answers.append((positions, answer))
        return None if answer else positions

    @lazy_property
    def _answers(self) -> list[tuple[Tensor, bool]]:
        """Whether positions that the layers of this pass have asked about count all tokens."""
        return []

    def _count_all_tokens(self, positions: Tensor) -> bool:
        end = self.offset + self.t
        if self.segments is not None or not (self.given is None or self.given[:, :end].all()):
            return False
        places = torch.arange(self.offset, end, device=positions.device)
        return torch.equal(positions, places.expand_as(positions))

    def _sees(self, step: int) -> Tensor:
        """``[b t]``: whether each token sees the one `step` further on."""
        rows = torch.arange(self.b, device=self.device)[:, None]
        tokens = self.offset + torch.arange(self.t, device=self.device)[None].expand(self.b, -1)
        # at the ends a token looks at itself, which it sees: the first one begins no document
        others = (tokens + step).clamp(self.offset, self.offset + self.t - 1)
        return self.visible(rows, rows * 0, tokens, others).expand(self.b, self.t)


def make_masks(softmax: str, **options: Any) -> ForwardMasks:
    """Make the masks of a forward pass; transformers calls it as its mask function.

    Args:
        softmax: Name of the implementation whose masks the softmax layers get.
        options: Arguments of transformers' mask functions; ``allow_is_causal_skip`` says that the
            mask may be left out where it is causal.
    """
    offset = options["q_offset"]
    return ForwardMasks(
        build=partial(softmax_mask(softmax), **options),
        visible=options["mask_function"],
        given=options["attention_mask"],
        plain=options["allow_is_causal_skip"],
        b=options["batch_size"],
        t=options["q_length"],
        offset=int(offset) if isinstance(offset, Tensor) else offset,
        device=options["device"],
    )
