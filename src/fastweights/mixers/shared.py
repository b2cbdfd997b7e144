"""Zamba's transformer blocks, whose weights several layers share (Glorioso et al., 2024; Zamba2,
2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fastweights.layers import (
    GatedMLP,
    Linear,
    LowRank,
    Rope,
    TokenContext,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Recurrence, ShapeError, Softmax
from fastweights.shapes import Embedded, Output


class SharedBlock(nn.Module):
    """The weights of a transformer block that layers share: of attention that reads [x, e], the
    stream and the embeddings side by side, and of a gated MLP behind it. `SharedAttention` computes
    with them.

    Args:
        d: Channels of the stream.
        norm: Makes a norm of so many channels.
        activation: Of the MLP.
        width: Channels inside the MLP.
        heads, kv_heads: As those of `SoftmaxAttention`.
        head_width: Channels of a head; None for 2 d / heads.
        rank: Channels of what every layer adds to the MLP's projections; None for nothing.
        attention_rank: Likewise to the projections of q, k and v.
        rope: Fields of `Rope`.
    """

    def __init__(
        self,
        d: int,
        norm: Callable[[int], nn.Module],
        activation: nn.Module,
        width: Count,
        heads: Count = 4,
        kv_heads: Count | None = None,
        head_width: Count | None = None,
        rank: Count | None = None,
        attention_rank: Count | None = None,
        rope: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ShapeError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
        own = _width_of_heads(d, heads) if head_width is None else head_width
        self.d, self.heads, self.kv_heads = d, heads, kv_heads
        self.rank, self.attention_rank = rank, attention_rank
        self.rope = Rope(own, **(rope or {}))
        self.norm = norm(2 * d)
        self.W_q = Linear(2 * d, own * heads, bias=False)
        self.W_k, self.W_v = (Linear(2 * d, own * kv_heads, bias=False) for _ in range(2))
        self.W_o = Linear(own * heads, d, bias=False)
        self.mlp_norm = norm(d)
        self.mlp = GatedMLP(d, width, activation, bias=False)


def _width_of_heads(d: int, heads: int) -> int:
    return head_width("2 d", 2 * d, heads)


class SharedAttention(Mixer):
    """A shared block in the place of one layer: what it gives to the input of the layer's mixer.

    With the block's u = Norm [x, e], q = RoPE(u (W_q + A_q)), k likewise, v = u (W_v + A_v), it is
    y = MLP(Norm(softmax(q kᵀ / √d_k) v W)) W_o, where A_q, A_k, A_v and what is added to W_1 and
    W_2 of the MLP are of low rank, and, like W_o, the layer's own (Zamba2, Fig. 2).

    Args:
        block: The weights that are shared, which are not among this module's parameters.
    """

    def __init__(self, block: SharedBlock) -> None:
        d, inside = block.d, block.mlp.W_1.out_features
        super().__init__(d)
        self._shared = (block,)  # in a tuple, so that its weights are the model's alone
        self.adapters = nn.ModuleDict()
        if block.attention_rank is not None:
            for name, W in zip("qkv", (block.W_q, block.W_k, block.W_v), strict=True):
                adapter = LowRank(2 * d, block.attention_rank, W.out_features, bias=False)
                self.adapters[name] = adapter
        if block.rank is not None:
            self.adapters["mlp"] = LowRank(d, block.rank, 2 * inside, bias=False)
        self.W_o = Linear(d, d, bias=False)

    @property
    def block(self) -> SharedBlock:
        """The weights that are shared."""
        return self._shared[0]

    def project(self, x: Embedded, past: TokenContext) -> tuple[Softmax, None]:
        block, e = self.block, past.stream.take_embeddings()
        e = e if past.keep is None else e.masked_fill(~past.keep[..., None], 0)
        u = block.norm(torch.cat([x, e], -1))
        q, k, v = project_each(u, block.W_q, block.W_k, block.W_v)
        q, k, v = (self._adapted(y, name, u) for y, name in ((q, "q"), (k, "k"), (v, "v")))
        q, k = split_heads(q, block.heads), split_heads(k, block.kv_heads)
        q, k = block.rope.turn(past.positions, q, k)
        return Softmax(q, k, split_heads(v, block.kv_heads)), None

    def read(self, o: Output, gate: None, recurrence: Recurrence) -> Embedded:
        block, mlp = self.block, self.block.mlp
        x = block.mlp_norm(block.W_o(o.flatten(-2)))
        both = torch.cat(project_each(x, mlp.W_1, mlp.W_2), -1)
        left, right = self._adapted(both, "mlp", x).chunk(2, -1)
        return self.W_o(mlp.W_3(mlp.activation(left) * right))

    def _adapted(self, y: Tensor, name: str, x: Tensor) -> Tensor:
        return y + self.adapters[name](x) if name in self.adapters else y
