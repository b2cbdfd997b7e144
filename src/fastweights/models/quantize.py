"""Weights of few bits: models for decoding that take and read a fraction of the memory; saved and
loaded as transformers' quantized models are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

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
FACTOR = "scalar_embed_scale"
"""What transformers' embeddings have that multiply their vectors by it."""
METHOD = "fastweights"
"""What a configuration of such weights says of itself."""

Model = TypeVar("Model", bound=nn.Module)
WeightOf = Callable[[type[QuantizedWeight], Tensor], QuantizedWeight | None]


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
    """Of int8 with a scale per output and 32 inputs: `Int8Weight`.

    Attributes:
        codes: ``[o i]``, int8
        scale: ``[o ⌈i/32⌉]``, float16, what they are multiplied by
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
    """An embedding of int8 with a scale per token and 32 channels, which a head may share.

    Attributes:
        num_embeddings, embedding_dim: as torch names them
        factor: what vectors are multiplied by, as Gemma's are
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
        self.factor = getattr(layer, FACTOR, 1.0)
        self.register_buffer("like", layer.weight.new_empty(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        vectors = self.stored.rows(input, self.like.dtype)
        return vectors if self.factor == 1 else vectors * vectors.new_tensor(self.factor)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


@register_quantization_config(METHOD)
class FewBitsConfig(QuantizationConfigMixin):
    """How weights are rounded, for transformers' ``from_pretrained(..., quantization_config=)``,
    which then holds one weight in floats at a time; `quantize` says what is rounded.

    Args:
        bits: 4 or 8
        modules_to_not_convert: Names of linear layers and embeddings that stay as they are.

    Raises:
        ValueError: for other `bits`
    """

    def __init__(
        self, bits: int = 8, modules_to_not_convert: list[str] | None = None, **_: Any
    ) -> None:
        if bits not in BITS:
            raise ValueError(f"weights of {bits} bits; they are of 8 or of 4")
        self.quant_method: Any = METHOD
        self.bits, self.modules_to_not_convert = bits, list(modules_to_not_convert or ())


def quantize(model: Model, bits: int = 8) -> Model:
    """Round the weights of embeddings and linear layers, in place; for decoding, not for training.

    Every 32 inputs of an output have a scale, by which the largest weight is 127 of 8 bits; of 4
    bits they have a scale and an offset. Beside 4 bits, embeddings and the head, which perplexity
    depends on most, and layers of other widths are of 8 bits. Convolutions, norms and all else stay
    as they are, and so do layers of other classes than torch's or ours, such as adapters, and
    weights beyond the range that float16, which scales are of, holds well: those whose largest is
    below 1e-3 or above 8e6, or 3e4 of 4 bits. Codes of a GGUF file of Q8_0, Q4_0 or Q4_1 stay what
    they are.

    A model of transformers' classes is saved by ``save_pretrained`` with its codes, and loaded by
    ``from_pretrained`` once fastweights is imported.

    Args:
        model: any; ours, a linearized one, transformers' own
        bits: 4 or 8

    Returns:
        the model

    Raises:
        ValueError: if it has no linear layer to quantize, or for other `bits`
    """
    return round_each(model, bits, _round)


def _round(kind: type[QuantizedWeight], weight: Tensor) -> QuantizedWeight | None:
    return kind.of(weight.detach()) if kind.holds(weight) else None


def round_each(model: Model, bits: int, weight_of: WeightOf) -> Model:
    """`quantize` with weights from elsewhere.

    Args:
        model: as `quantize` takes it
        bits: 4 or 8
        weight_of: what is stored of a kind for a parameter ``[o i]``; None: it stays

    Returns:
        the model
    """
    config = FewBitsConfig(bits)
    layers = _layers(model)
    if not any(isinstance(layer, nn.Linear) for *_, layer in layers.values()):
        raise ValueError(
            f"quantize: a {type(model).__name__} has no linear layer of torch's or ours;"
            " is it quantized already?"
        )
    head, made = _head(model), dict[int, QuantizedWeight | None]()
    for path, (parent, name, layer) in layers.items():
        own, shared = _kind_of(layer, bits, head), id(layer.weight)
        if shared not in made:
            made[shared] = weight_of(own.kind, layer.weight)
        if (stored := made[shared]) is None:
            config.modules_to_not_convert.append(path)
        else:
            setattr(parent, name, own(layer, stored))
    if isinstance(model, PreTrainedModel):
        whole: Any = model
        whole.config.quantization_config = config
        whole.hf_quantizer = FewBitsQuantizer(config)
        _tie_codes(model)
    return model


def stored_bits(config: Any) -> int | None:
    """Of a model's weights, where they are stored as `quantize` rounds them."""
    found: Any = getattr(config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    return found["bits"] if found.get("quant_method") == METHOD else None


def _layers(model: nn.Module) -> dict[str, tuple[nn.Module, str, Any]]:
    """What can be rounded, by its path: the module that it belongs to, its name there, and it. What
    shares its weight with a module of another kind stays, as that does.
    """
    found = {
        f"{path}.{name}".removeprefix("."): (parent, name, layer)
        for path, parent in model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) in (nn.Linear, Linear, nn.Embedding)
        or (isinstance(layer, nn.Embedding) and hasattr(layer, FACTOR))
    }
    for pair in _sharing(model):
        if not all(path in found for path in pair):
            for path in pair:
                found.pop(path, None)
    return found


def _sharing(model: Any) -> list[tuple[str, str]]:
    """Paths of modules that share a weight: of one that is given it, and of one that has it."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    pairs = [(*target.rpartition("."), *source.rpartition(".")) for target, source in ties.items()]
    return [(own, other) for own, _, end, other, _, its in pairs if end == its == "weight"]


def _head(model: Any) -> Any:
    """The layer that makes logits; None if there is none."""
    found: Any = getattr(model, "get_output_embeddings", lambda: None)
    return found()


def _kind_of(layer: Any, bits: int, head: Any) -> Any:
    """What a layer becomes."""
    if isinstance(layer, nn.Embedding):
        return Int8Embedding
    fine = bits == 8 or layer is head or layer.in_features % GROUP != 0
    return Int8Linear if fine else Int4Linear


def _tie_codes(model: Any) -> None:
    """Have what shares a rounded weight share its codes, for whoever saves or loads the model."""
    ties: dict[str, str] = model.all_tied_weights_keys
    for own, other in _sharing(model):
        shared = model.get_submodule(other)
        if isinstance(shared, _Rounded):
            del ties[f"{own}.weight"]
            fields = shared.kind._fields
            ties.update({f"{own}.{field}": f"{other}.{field}" for field in fields})


@register_quantizer(METHOD)
class FewBitsQuantizer(HfQuantizer):
    """What transformers asks when it loads or saves a model with weights of few bits."""

    quantization_config: Any
    requires_calibration = False

    def __init__(self, quantization_config: FewBitsConfig, **named: Any) -> None:
        super().__init__(quantization_config, **named)
        self.tied: dict[str, str] = {}

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.layers, self.head = _layers(model), _head(model)
        for path in self.quantization_config.modules_to_not_convert:
            self.layers.pop(path, None)
        self._untie(model)
        if self.pre_quantized:
            for path in self.layers.keys() - self.tied:
                parent, name, layer = self.layers[path]
                own = self.kind_of(layer)
                setattr(parent, name, own(layer, own.kind.room(*layer.weight.shape)))

    def _untie(self, model: Any) -> None:
        """Keep away from transformers, which ties parameters, what shares a rounded weight."""
        for own, other in _sharing(model):
            if own in self.layers and other in self.layers:
                parent, name, _ = self.layers[own]
                setattr(parent, name, nn.Identity())
                self.tied[own] = other
                del model.all_tied_weights_keys[f"{own}.weight"]

    def kind_of(self, layer: Any) -> Any:
        """What a layer becomes."""
        return _kind_of(layer, self.quantization_config.bits, self.head)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        path = param_name.removesuffix(".weight")
        return not self.pre_quantized and path != param_name and path in self.layers

    def get_quantize_ops(self) -> ConversionOps:
        return _RoundOnLoad(self)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for target, source in self.tied.items():
            (parent, name, layer), shared = self.layers[target], model.get_submodule(source)
            if isinstance(shared, _Rounded):
                layer = self.kind_of(layer)(layer, shared.stored)
            else:
                layer.weight = shared.weight
                self.quantization_config.modules_to_not_convert.append(target)
            setattr(parent, name, layer)
            model.all_tied_weights_keys[f"{target}.weight"] = f"{source}.weight"
        _tie_codes(model)
        self.layers, self.head, self.tied = {}, None, {}
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, of those that are shared one."""
        state = model.state_dict()
        for name in getattr(model, "all_tied_weights_keys", ()):
            state.pop(name, None)
        return state, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class _RoundOnLoad(ConversionOps):
    """Round a weight as soon as it is loaded, and put it where its layer was."""

    def __init__(self, quantizer: FewBitsQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: Mapping[str, Any],
        *_: Any,
        model: Any,
        full_layer_name: str,
        missing_keys: set[str],
        **__: Any,
    ) -> dict[str, Any]:
        (weight,) = input_dict.values()
        weight = weight[0] if isinstance(weight, list) else weight
        path = full_layer_name.removesuffix(".weight")
        parent, name, layer = self.quantizer.layers[path]
        own = self.quantizer.kind_of(layer)
        if weight.shape != layer.weight.shape:
            return {full_layer_name: weight}  # transformers says what is wrong
        if not own.kind.holds(weight):
            self.quantizer.quantization_config.modules_to_not_convert.append(path)
            return {full_layer_name: weight.to(layer.weight.dtype)}
        rounded = own(layer, own.kind.of(weight))
        for values in rounded.buffers():
            values._is_hf_initialized = True
        setattr(parent, name, rounded)
        missing_keys.discard(full_layer_name)
        return {}
