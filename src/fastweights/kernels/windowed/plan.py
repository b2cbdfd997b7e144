"""How a record with a window is cut into blocks of queries, and blocks into strips of keys."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from fastweights.recurrence.windowed import WindowedLinear

FEWEST, MOST = 64, 256
"""Queries per block: fewer are too few for a matrix product, and more than the window has keys
bring nothing.
"""
SCORES = 1 << 19
"""Queries × keys at once, over all heads."""


class WindowPlan(NamedTuple):
    """Queries per block, window, blocks in all, blocks at once; of the record whether both sides
    share one normaliser, what bounds the scores, and whether they are relative to a scale.
    """

    block: int
    window: int
    blocks: int
    blocks_at_once: int
    shared: bool
    softcap: float | None
    scaled: bool

    @classmethod
    def of(cls, recurrence: WindowedLinear, past: int) -> Self:
        """`past` tokens are cached; a window that reaches beyond the first of them need not be as
        wide.
        """
        b, t, h = recurrence.shape
        window = min(recurrence.window, past + t + 1)
        block = min(max(window, FEWEST), MOST)
        at_once = SCORES // (b * h * block * (block + window))
        return cls(
            block,
            window,
            -(-t // block),
            max(1, at_once),
            recurrence.shared,
            recurrence.softcap,
            recurrence.log_scale is not None,
        )

    @property
    def strip(self) -> int:
        return self.window + self.block

    @property
    def length(self) -> int:
        return self.blocks * self.block

    def spans(self) -> list[slice]:
        """The blocks that are evaluated together."""
        return [
            slice(n, min(n + self.blocks_at_once, self.blocks))
            for n in range(0, self.blocks, self.blocks_at_once)
        ]

    def queries(self, stream: Tensor, span: slice) -> Tensor:
        """``[b g r T ·]`` → ``[b g n r·c ·]``, the blocks of the span."""
        tokens = stream[..., span.start * self.block : span.stop * self.block, :]
        return tokens.unflatten(-2, (-1, self.block)).transpose(2, 3).flatten(3, 4)

    def merge_queries(self, blocks: Tensor) -> Tensor:
        """The reverse of `queries`."""
        return blocks.unflatten(3, (-1, self.block)).transpose(2, 3).flatten(3, 4)

    def strips(self, stream: Tensor, span: slice, width: int) -> Tensor:
        """``[b g w+T ·]`` → ``[b g n width ·]``, the first `width` tokens of every strip of the
        span.
        """
        tokens = stream[:, :, span.start * self.block : (span.stop - 1) * self.block + width]
        return tokens.unfold(2, width, self.block).mT.contiguous()

    def add_strips(self, strips: Tensor, span: slice, out: Tensor) -> None:
        """Adds ``[b g n width ·]`` to the tokens it was taken from."""
        for n in range(strips.shape[2]):
            start = (span.start + n) * self.block
            out[:, :, start : start + strips.shape[3]] += strips[:, :, n]
