"""Weights of few bits: models for decoding that take and read a fraction of the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NoReturn, TypeVar

from torch import Tensor, nn

from fastweights.layers import Linear
from fastweights.ops.quantized import (
    GROUP,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    multiply_quantized,
)

BITS = (4, 8)
"""Of a weight that is rounded."""

Model = TypeVar("Model", bound=nn.Module)


class _Rounded(nn.Module):
    """A module whose weight is of few bits, in buffers that keep their dtypes."""

    kind: ClassVar[type[QuantizedWeight]]

    def __init__(self, stored: QuantizedWeight) -> None:
        super().__init__()
        for name, values in stored._asdict().items():
            self.register_buffer(name, values)

    @property
    def stored(self) -> QuantizedWeight:
        """The weight ``[o i]``."""
        return self.kind(*(getattr(self, name) for name in self.kind._fields))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.stored
        super()._apply(fn, recurse)
        for name, values in before._asdict().items():
            if (after := getattr(self, name)).dtype is not values.dtype:
                setattr(self, name, values.to(after.device))
        return self

    def _save_to_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "a quantized model is not saved: save the model before quantizing it, and quantize it"
            " again when it is loaded"
        )


class QuantizedLinear(_Rounded):
    """A linear layer whose weight is of few bits.

    Attributes:
        in_features, out_features: as torch names them
        bias: ``[o]`` or None
    """

    bias: Tensor | None

    def __init__(self, layer: nn.Linear, stored: QuantizedWeight | None = None) -> None:
        """Round a layer's weight to the nearest, unless it is `stored` already."""
        super().__init__(stored or self.kind.of(layer.weight.detach()))
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, input: Tensor) -> Tensor:
        return multiply_quantized(input, self.stored, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Int8Linear(QuantizedLinear):
    """Of int8 with a scale per output: `Int8Weight`.

    Attributes:
        codes: ``[o i]``, int8
        scale: ``[o]``, what they are multiplied by
    """

    kind = Int8Weight
    codes: Tensor
    scale: Tensor


class Int4Linear(QuantizedLinear):
    """Of four bits with a scale and an offset per output and 32 inputs: `Int4Weight`.

    Attributes:
        codes: ``[o i/2]``, uint8
        scale, offset: ``[o i/32]``, float16
    """

    kind = Int4Weight
    codes: Tensor
    scale: Tensor
    offset: Tensor


class Int8Embedding(_Rounded):
    """An embedding of int8 with a scale per token, which a head may share.

    Attributes:
        num_embeddings, embedding_dim: as torch names them
        like: ``[0]``, of the vectors' dtype
    """

    kind = Int8Weight
    codes: Tensor
    scale: Tensor
    like: Tensor

    def __init__(self, layer: nn.Embedding, stored: Int8Weight | None = None) -> None:
        """Round a layer's weight to the nearest, unless it is `stored` already."""
        super().__init__(stored or Int8Weight.of(layer.weight.detach()))
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.register_buffer("like", layer.weight.new_empty(0))

    def forward(self, input: Tensor) -> Tensor:
        return self.stored.rows(input, self.like.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def quantize(model: Model, bits: int = 8) -> Model:
    """Round the weights of embeddings and linear layers, in place; for decoding, not for training.

    Of 8 bits, every output of a layer has a scale, by which its largest weight is 127. Of 4 bits,
    every 32 inputs of an output have a scale and an offset of their own; embeddings and the head,
    which perplexity depends on most, and layers of other widths are of 8 bits. Convolutions, norms
    and all else stay as they are, and so do layers of other classes than torch's or ours, such as
    adapters.

    Args:
        model: any; ours, a linearized one, transformers' own
        bits: 4 or 8

    Returns:
        the model

    Raises:
        ValueError: if it has no linear layer to quantize, for other `bits`, or for weights that
            float16 does not hold, of 4 bits; the model is as it was then
    """
    if bits not in BITS:
        raise ValueError(f"quantize: weights of {bits} bits; they are of 8 or of 4")
    layers = list(_layers(model))
    if not any(isinstance(layer, nn.Linear) for *_, layer in layers):
        raise ValueError(
            f"quantize: a {type(model).__name__} has no linear layer of torch's or ours;"
            " is it quantized already?"
        )
    fine = _fine(model, layers) if bits == 4 else {id(layer.weight) for *_, layer in layers}
    for weight in (layer.weight for *_, layer in layers if id(layer.weight) not in fine):
        Int4Weight.ends(weight.detach().float().unflatten(1, (-1, GROUP)))
    stored = dict[int, Any]()
    for parent, name, layer in layers:
        made: Any = Int8Linear if id(layer.weight) in fine else Int4Linear
        made = Int8Embedding if isinstance(layer, nn.Embedding) else made
        own = made(layer, stored.get(id(layer.weight)))
        stored[id(layer.weight)] = own.stored
        setattr(parent, name, own)
    return model


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """What is rounded: the module that it belongs to, its name there, and it."""
    kinds = (nn.Linear, Linear, nn.Embedding)
    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) in kinds:
                yield parent, name, layer


def _fine(model: nn.Module, layers: Iterable[tuple[nn.Module, str, Any]]) -> set[int]:
    """The weights that are of 8 bits where others are of 4."""
    head_of: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = head_of()
    return {
        id(layer.weight)
        for *_, layer in layers
        if isinstance(layer, nn.Embedding) or layer is head or layer.in_features % GROUP
    }
