"""One layer of a model: a mixer over time, an MLP over channels, and the residual stream around
them.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from fastweights.layers import MLP, MLPS, NORMS, GatedMLP, LayerStream
from fastweights.methods import Auto, Method
from fastweights.mixer import Bidirectional, MixerState
from fastweights.mixers import make
from fastweights.models.config import FastWeightsConfig
from fastweights.shapes import Embedded, Mask, Segments


class Block(GradientCheckpointingLayer):
    """x ← x + Mixer(Norm x);  x ← x + MLP(Norm x), or both at once: x ← x + Mixer(Norm x) +
    MLP(Norm' x); with the norms behind: x ← x + Norm(Mixer x) and so on
    """

    def __init__(self, config: FastWeightsConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.norms_behind = config.norms_behind[layer % len(config.norms_behind)]
        self.mixer_norm = normalization(config)
        mixer = make(d=config.hidden_size, **config.layer_mixers[layer])
        self.mixer = Bidirectional(mixer) if config.bidirectional else mixer
        self.mlp_norm, self.mlp = (
            (None, None) if config.mlp is None else (normalization(config), _mlp(config))
        )
        self.dropout = dropout(config.residual_dropout)

    def forward(
        self,
        x: Embedded,
        state: MixerState | None,
        keep: Mask | None,
        segments: Segments | None,
        method: Method = Auto(),
        values: Tensor | None = None,
    ) -> tuple[Embedded, MixerState | None, Tensor | None]:
        """x behind the layer, the mixer's state, and the values that later layers may take up:
        those given, or the mixer's own if it leaves them.
        """
        stream = LayerStream(values)
        read = x if self.norms_behind else self.mixer_norm(x)
        y, after = self.mixer(
            read, state, keep=keep, segments=segments, method=method, stream=stream
        )
        mixed = x + self.dropout(self.mixer_norm(y) if self.norms_behind else y)
        if self.mlp_norm is None or self.mlp is None:
            return mixed, after, stream.values
        read = x if self.parallel else mixed
        z = self.mlp_norm(self.mlp(read)) if self.norms_behind else self.mlp(self.mlp_norm(read))
        return mixed + self.dropout(z), after, stream.values

    @property
    def writers(self) -> list[nn.Module]:
        """The projections that write to the residual stream."""
        return [self.mixer.W_o] + ([self.mlp.W_o] if isinstance(self.mlp, GatedMLP | MLP) else [])


def normalization(config: FastWeightsConfig) -> nn.Module:
    """A new norm of the kind that the model uses outside its mixers."""
    return NORMS[config.norm](config.hidden_size, eps=config.norm_eps)


def dropout(p: float) -> nn.Module:
    """Dropout of this probability; for 0 what costs no operation."""
    return nn.Dropout(p) if p else nn.Identity()


def _mlp(config: FastWeightsConfig) -> nn.Module:
    assert config.mlp is not None
    activation = ACT2FN[config.hidden_act]
    return MLPS[config.mlp](config.hidden_size, config.mlp_size, activation, bias=config.mlp_bias)
