"""The linear layers of served models on a CPU: by oneDNN, from weights that it has packed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastweights.kernels import Kernel, register
from fastweights.ops.product import MOST_ROWS, Product

PACKED = "vllm_packed"
"""The attribute of a weight that has oneDNN's copy of it."""
NUMBERS_OF_ROWS = 32
"""For how many of them oneDNN remembers at a time how it multiplies."""


def pack_weights(model: nn.Module) -> None:
    """Have oneDNN pack the weights of a model's linear layers, which must not change from here on.

    Products of a few dozen rows, as a step of many sequences makes them, take less time than
    packing the weight, which libraries else do at every call. Weights are kept twice then. On what
    is no CPU, or has no oneDNN, nothing is packed.
    """
    from vllm import _custom_ops as operations
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and operations._supports_onednn):
        return
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().t()
            handler = operations.create_onednn_mm(weight, NUMBERS_OF_ROWS)
            vars(layer.weight)[PACKED] = handler
    register(PACKED_PRODUCT, before="product (oneDNN)")


def _multiply(product: Product) -> Tensor:
    from vllm import _custom_ops as operations

    return operations.onednn_mm(_packed(product), product.x.contiguous(), product.bias)


def _packed(product: Product) -> Any:
    return getattr(product.weight, PACKED, None)


def _refuses(product: Product) -> str | None:
    if _packed(product) is None:
        return "its weight is not packed"
    if product.requires_grad or torch.compiler.is_compiling():
        return "autograd or a compiler follows it"
    if product.x.numel() <= MOST_ROWS * product.x.shape[-1]:
        return f"it has {MOST_ROWS} rows at most, for which C reads the weight as it is"
    if product.x.dtype != product.weight.dtype:
        return f"its rows are of {product.x.dtype}, and its weight of {product.weight.dtype}"
    return None


PACKED_PRODUCT = Kernel(
    "product (oneDNN, packed weight)", Product, _multiply, _refuses, ("cpu",), True
)
