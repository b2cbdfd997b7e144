"""Hidden-state alignment: every layer learns to give what the softmax model's own layer gives.

Each layer reads what it reads in the softmax model, so that all learn at once and none from
another's mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastweights.layers import upcast
from fastweights.linearize.convert.attention import read_all
from fastweights.linearize.distill.losses import require_factors
from fastweights.linearize.evaluate.distances import count_tokens, output_error, squared_size
from fastweights.shapes import Mask

Take = Callable[[int, Tensor], Tensor]
"""Takes the number of a layer and its output ``[b t d]``, and returns what is passed on."""
Receive = Callable[[int, Tensor, Tensor], None]
"""Takes the number of a layer, its loss and the weight of that."""


@dataclass(frozen=True)
class HiddenLoss:
    """The distance of a layer's hidden output from that of the softmax model's own layer.

    squared · Σ‖ŷ - y‖² / Σ‖y‖² + norm · mean_t ‖ŷ_t - y_t‖ / √d

    The first term is relative, as is `TransferLoss`' (MOHAWK, arXiv 2408.10189, stage 2; HALO,
    arXiv 2601.22156), the second the plain distance of every token (RADLADS, arXiv 2505.03005, step
    1). Padding counts in neither. Parts of a batch are as the batch at once where there is one
    term; where there are both, parts count by their tokens.

    Attributes:
        squared: The factor of the relative squared error.
        norm: The factor of the distance.
        blocks: True to compare the outputs of whole blocks, with their MLPs; False for those of
            their attentions.

    Raises:
        ValueError: If a factor is negative, infinite or NaN, or both are 0.
    """

    squared: float = 1.0
    norm: float = 0.0
    blocks: bool = False

    def __post_init__(self) -> None:
        require_factors(self, self.squared, self.norm)

    def __call__(self, output: Tensor, target: Tensor, keep: Mask | None) -> Tensor:
        """Compute the loss of one layer, a scalar, from hidden states ``[b t d]``."""
        parts = []
        if self.squared:
            heads = output.unsqueeze(2), target.unsqueeze(2)
            parts.append(self.squared * output_error(*heads, keep))
        if self.norm:
            rows = torch.linalg.vector_norm(upcast(output) - upcast(target), dim=-1)
            kept = rows if keep is None else rows[keep]
            # of padding alone 0, and no NaN
            mean = kept.mean() if len(kept) else kept.sum()
            parts.append(self.norm * mean / output.shape[-1] ** 0.5)
        return torch.stack(parts).sum()

    def weight(self, target: Tensor, keep: Mask | None) -> Tensor:
        """Return what the loss of a part of a batch counts in that of the batch, a scalar."""
        if self.norm:
            return count_tokens(target, keep)
        return squared_size(target.unsqueeze(2), keep)


def hidden_states(
    model: PreTrainedModel, paths: Mapping[int, str], inputs: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Compute what these layers of a model give, without gradients, by the number of the layer."""
    found = dict[int, Tensor]()

    def take(layer: int, output: Tensor) -> Tensor:
        found[layer] = output.detach()
        return output

    with torch.no_grad(), _taken(model, paths, take):
        read_all(model, inputs)
    return found


def alignment(
    model: PreTrainedModel,
    paths: Mapping[int, str],
    inputs: Mapping[str, Tensor],
    targets: Mapping[int, Tensor],
    loss: HiddenLoss,
    receive: Receive = lambda layer, loss, weight: None,
) -> dict[int, Tensor]:
    """Compute the losses of these layers of a model, without graphs, by the number of the layer.

    Args:
        model: The linearized model.
        paths: The layers, as `aligned_layers` returns them.
        inputs: Inputs of the model.
        targets: What the layers of the softmax model give, which is passed on.
        loss: How far a layer is from that.
        receive: Called for every layer in turn with its loss, which has this layer's graph, and
            is the only one to hold it.
    """
    losses, mask = dict[int, Tensor](), inputs.get("attention_mask")
    keep = None if mask is None else mask.bool()

    def take(layer: int, output: Tensor) -> Tensor:
        found = loss(output, targets[layer], keep)
        receive(layer, found, loss.weight(targets[layer], keep))
        losses[layer] = found.detach()
        return targets[layer]

    with _taken(model, paths, take):
        read_all(model, inputs)
    return losses


@contextmanager
def _taken(model: nn.Module, paths: Mapping[int, str], take: Take) -> Iterator[None]:
    with ExitStack() as hooked:
        for layer, path in paths.items():
            hook = partial(_pass_on, layer, take)
            hooked.enter_context(model.get_submodule(path).register_forward_hook(hook))
        yield


def _pass_on(layer: int, take: Take, _module: nn.Module, _args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (take(layer, output[0]), *output[1:])
    return take(layer, output)
