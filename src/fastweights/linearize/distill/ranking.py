"""The damage that each linear layer does alone, as fla-org/hybrid-distillation measures it too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.modes import AttentionCall, Mode
from fastweights.linearize.distill.adapt import kl_from_softmax
from fastweights.runs.evaluation import evaluation_mode
from fastweights.shapes import Output


class OneLinearLayer(Mode):
    """A mode with softmax in all layers but one, to measure what converting that layer alone
    does."""

    constant = False

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def attend(self, call: AttentionCall) -> Output:
        return call.linear() if call.layer == self.layer else call.softmax()


def damage_by_layer(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[int, float]:
    """Measure how much each layer degrades the model when it alone is linear.

    Args:
        model: A linearized model.
        batches: Inputs of the model; ``labels`` among them are ignored.

    Returns:
        By layer, KL(softmax ‖ only this layer linear) of the next token in nats, the mean over
        `batches`.
    """
    batches = list(batches)
    with evaluation_mode(model):
        return {
            layer: _mean(kl_from_softmax(model, b, OneLinearLayer(layer)) for b in batches)
            for layer in branches(model)
        }


def most_damaging_layers(damages: Mapping[int, float], count: int) -> list[int]:
    """Return the `count` layers that do the most damage, in the order of the model.

    Raises:
        ValueError: If no linear layer would be left.
    """
    require_linear_layers(count, len(damages))
    worst = sorted(damages, key=lambda layer: -damages[layer])[:count]
    return sorted(worst)


def require_linear_layers(kept: int, layers: int) -> None:
    """Check that `kept` softmax layers among `layers` that can be linear leave one of them linear.

    Raises:
        ValueError: If they do not.
    """
    if not 0 <= kept < layers:
        raise ValueError(
            f"cannot keep {kept} of {layers} layers softmax; keep 0 to {layers - 1} of them"
        )


def _mean(values: Iterable[float]) -> float:
    found: Sequence[float] = list(values)
    return sum(found) / len(found)
