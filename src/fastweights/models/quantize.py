"""Weights of bytes: models for decoding that take and read a quarter of the memory."""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from fastweights.layers import Linear
from fastweights.ops.quantized import multiply_quantized

LARGEST = 127
"""Of an int8, on both sides of 0."""

Model = TypeVar("Model", bound=nn.Module)


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 with a scale per output; its sums are those of floats.

    Attributes:
        in_features, out_features: as torch names them
        codes: ``[o i]``, int8
        scale: ``[o]``, what they are multiplied by
        bias: ``[o]`` or None
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        """Round a layer's weight to the nearest multiple of its scale, output by output."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        scale = weight.abs().amax(dim=1) / LARGEST
        scale = scale.where(scale > 0, torch.ones_like(scale))
        codes = (weight / scale[:, None]).round().to(torch.int8)
        bias = None if layer.bias is None else layer.bias.detach()
        for name, values in (("codes", codes), ("scale", scale), ("bias", bias)):
            self.register_buffer(name, values)

    def forward(self, input: Tensor) -> Tensor:
        return multiply_quantized(input, self.codes, self.scale, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _save_to_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "a quantized model is not saved: save the model before quantizing it, and quantize it"
            " again when it is loaded"
        )


def quantize(model: Model) -> Model:
    """Round the weights of all linear layers to int8, in place; for decoding, not for training.

    Every output of a layer has a scale, by which its largest weight is 127. Embeddings, a head that
    shares its weight with them, convolutions, norms and all else stay as they are, and so do
    layers of other classes than torch's or ours, such as adapters.

    Args:
        model: any; ours, a linearized one, transformers' own

    Returns:
        the model

    Raises:
        ValueError: if it has no linear layer to quantize
    """
    uses = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    chosen = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, Linear)
        if uses[id(layer.weight)] == 1
    ]
    if not chosen:
        raise ValueError(
            f"quantize: a {type(model).__name__} has no linear layer of torch's or ours"
            " with a weight of its own; is it quantized already?"
        )
    for parent, name, layer in chosen:
        setattr(parent, name, Int8Linear(layer))
    return model
