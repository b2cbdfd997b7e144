"""One layer of a model: a mixer over time, an MLP over channels, and the residual stream around
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fastweights.layers import NORMS, LayerStream, writers_of
from fastweights.methods import Auto, Method
from fastweights.mixer import Bidirectional, LayerState, MixerSum, SumState
from fastweights.mixers.shared import SharedAttention, SharedBlock
from fastweights.models.config import FastWeightsConfig
from fastweights.shapes import Embedded, Mask, Segments


class Block(GradientCheckpointingLayer):
    """x ← x + Mixer(Norm x);  x ← x + MLP(Norm x), or both at once: x ← x + Mixer(Norm x) +
    MLP(Norm' x); with the norms behind: x ← x + Norm(Mixer x) and so on; with norms on both sides:
    x ← x + Norm'(Mixer(Norm x)); or each to what it reads: x ← Norm x + Mixer(Norm x);  x ← Norm x
    + MLP(Norm x). Several mixers in the place of one are added. What a block that layers share
    gives here is added to what the mixer reads.

    Args:
        config: The model's.
        layer: The number of the layer.
        shared: The block that this layer shares with others; None for none.
    """

    def __init__(
        self, config: FastWeightsConfig, layer: int, shared: SharedBlock | None = None
    ) -> None:
        super().__init__()
        self.shared = None if shared is None else SharedAttention(shared)
        self.parallel = config.parallel_residual
        self.post_norm = config.post_norm[layer % len(config.post_norm)]
        self.normalized = config.normalized_residual
        self.mixer_norm = normalization(config)
        self.mixer_norm_behind = _second_norm(config)
        first, *others = config.make_mixers(config.layer_mixers[layer])
        mixer = MixerSum([first, *others]) if others else first
        self.mixer = Bidirectional(first) if config.bidirectional else mixer
        self.mlp = config.make_mlp(layer)
        self.mlp_norm = None if self.mlp is None else normalization(config)
        self.mlp_norm_behind = nn.Identity() if self.mlp is None else _second_norm(config)
        self.dropout = dropout(config.residual_dropout)
        self.depth = stochastic_depth(config, layer)

    def forward(
        self,
        x: Embedded,
        state: LayerState | None,
        keep: Mask | None,
        segments: Segments | None,
        method: Method = Auto(),
        values: Tensor | None = None,
        embeddings: Embedded | None = None,
    ) -> tuple[Embedded, LayerState | None, Tensor | None]:
        """x behind the layer, its state, and the values that later layers may take up: those given,
        or the mixer's own if it leaves them. A shared block reads the embeddings.
        """
        stream = LayerStream(values, embeddings)
        given = {"keep": keep, "segments": segments, "method": method, "stream": stream}
        read, shared_state = x, None
        if self.shared is not None:
            before, state = state.states if isinstance(state, SumState) else (state, state)
            y, shared_state = self.shared(x, before, **given)
            read = x + y
        read = read if self.post_norm else self.mixer_norm(read)
        y, after = self.mixer(read, state, **given)
        after = after if shared_state is None else SumState((shared_state, after))
        y = self.mixer_norm(y) if self.post_norm else self.mixer_norm_behind(y)
        y = self.depth(self.dropout(y))
        mixed = (read if self.normalized else x) + y
        if self.mlp_norm is None or self.mlp is None:
            return mixed, after, stream.values
        read = x if self.parallel else mixed
        read = read if self.post_norm else self.mlp_norm(read)
        z = self.mlp(read)
        z = self.mlp_norm(z) if self.post_norm else self.mlp_norm_behind(z)
        return (
            (read if self.normalized else mixed) + self.depth(self.dropout(z)),
            after,
            stream.values,
        )

    @property
    def norms(self) -> list[nn.Module | None]:
        """The norms around the mixer and the MLP."""
        return [self.mixer_norm, self.mixer_norm_behind, self.mlp_norm, self.mlp_norm_behind]

    @property
    def writers(self) -> list[nn.Module]:
        """The projections that write to the residual stream."""
        mixers: Any = self.mixer.mixers if isinstance(self.mixer, MixerSum) else [self.mixer]
        return [*(mixer.W_o for mixer in mixers), *writers_of(self.mlp)]


def normalization(config: FastWeightsConfig) -> nn.Module:
    """A new norm of the kind that the model uses outside its mixers."""
    return NORMS[config.norm](config.hidden_size, eps=config.norm_eps)


def _second_norm(config: FastWeightsConfig) -> nn.Module:
    """The norm behind a mixer or an MLP; where there is none, what costs no operation."""
    return normalization(config) if config.sandwich_norms else nn.Identity()


def dropout(p: float) -> nn.Module:
    """Dropout of this probability; for 0 what costs no operation."""
    return nn.Dropout(p) if p else nn.Identity()


class StochasticDepth(nn.Module):
    """Leave out whole examples in training, with probability p, and scale the others by
    1 / (1 - p) (Huang et al., 2016).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Embedded) -> Embedded:
        if not self.training:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.p
        return x * kept / (1 - self.p)


def stochastic_depth(config: FastWeightsConfig, layer: int) -> nn.Module:
    """That of a layer, which grows linearly with the depth; where it is 0 what costs no
    operation."""
    p = config.stochastic_depth * layer / max(config.num_hidden_layers - 1, 1)
    return StochasticDepth(p) if p else nn.Identity()
