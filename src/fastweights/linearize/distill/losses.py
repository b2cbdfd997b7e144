"""What the losses of all stages share, and those of layers over the parts of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fastweights.ranges import NON_NEGATIVE_NUMBER
from fastweights.training.loop.processes import Processes


def require_factors(loss: object, *factors: float) -> None:
    """Check the factors of a loss's terms.

    Raises:
        ValueError: If one is negative, infinite or NaN, or all are 0.
    """
    if not all(factor in NON_NEGATIVE_NUMBER for factor in factors) or sum(factors) == 0:
        raise ValueError(
            f"{loss}: all factors must be at least 0 and finite, and one of them above 0"
        )


class LayerParts:
    """What each part of a batch counts in every layer's loss: by what it was divided by itself.

    The loss of a batch is Σ_k w_k loss_k / Σ_k w_k over its parts k in all processes, which have
    the weights w_k. A part's gradient is added w_k / w_1 times; w_1 / Σ_k w_k is left for the end
    of the batch, when all weights are known. So a batch of one part keeps every bit.
    """

    def __init__(self) -> None:
        self._weights: dict[int, list[Tensor]] = {}
        self._share = 1.0

    def factor(self, layer: int, weight: Tensor, share: float) -> Tensor:
        """Return the factor of a part's gradient, and remember the part.

        Args:
            layer: Number of the layer.
            weight: The part's weight in this layer.
            share: The factor if all parts of the batch had this weight.
        """
        self._share = share
        weights = self._weights.setdefault(layer, [])
        weights.append(weight.detach())
        return share * (weight / _positive(weights[0]))

    def settle(
        self, modules: Mapping[int, nn.Module], processes: Processes
    ) -> dict[int, list[float]]:
        """End a batch: multiply its gradients by what is left, and return the shares of its parts.

        Args:
            modules: What each layer's loss trains, by the layer's number.
            processes: The processes, over which gradients and losses are averaged then.
        """
        shares = dict[int, list[float]]()
        own = {layer: [float(w) for w in weights] for layer, weights in self._weights.items()}
        # Σ_k w_k over all processes; divided by their number, as gradients are averaged over them
        found = processes.total({str(layer): sum(weights) for layer, weights in own.items()})
        for layer, weights in own.items():
            total = found[str(layer)] / processes.count or 1.0
            shares[layer] = [weight / total for weight in weights]
            # gradients are share · Σ_k (w_k / w_1) ∇loss_k so far
            _multiply(modules[layer], (weights[0] or 1.0) / total / self._share)
        self._weights.clear()
        return shares


def _positive(weight: Tensor) -> Tensor:
    return weight.where(weight > 0, 1)


def _multiply(module: nn.Module, factor: float) -> None:
    """Multiply gradients."""
    for parameter in module.parameters():
        if factor != 1 and parameter.grad is not None:
            parameter.grad.mul_(factor)
