"""Which layers may be linear: the damage that each does alone (fla-org/hybrid-distillation measures
it likewise).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from fastweights.linearize.convert.attach import branches
from fastweights.linearize.convert.modes import AttentionCall, Mode
from fastweights.linearize.distill.adapt import kl_from_softmax
from fastweights.runs.evaluation import evaluation_mode
from fastweights.shapes import Output


class OneLinearLayer(Mode):
    """Softmax in all layers but one."""

    constant = False

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def attend(self, call: AttentionCall) -> Output:
        return call.linear() if call.layer == self.layer else call.softmax()


def damage_by_layer(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[int, float]:
    """KL(softmax ‖ only this layer linear) of the next token by layer, in nats: the mean over
    `batches`.
    """
    batches = list(batches)
    with evaluation_mode(model):
        return {
            layer: _mean(kl_from_softmax(model, b, OneLinearLayer(layer)) for b in batches)
            for layer in branches(model)
        }


def most_damaging_layers(damages: Mapping[int, float], count: int) -> list[int]:
    """The `count` layers that do the most damage, in order. Raises ValueError if none would be
    left.
    """
    if not 0 <= count < len(damages):
        raise ValueError(
            f"{count} softmax layers of {len(damages)}; keep 0 to {len(damages) - 1} of them"
        )
    worst = sorted(damages, key=lambda layer: -damages[layer])[:count]
    return sorted(worst)


def _mean(values: Iterable[float]) -> float:
    found: Sequence[float] = list(values)
    return sum(found) / len(found)
