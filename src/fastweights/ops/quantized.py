"""The product of tokens with a weight of few bits: in C where there are few rows, else by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.native import abi, library
from fastweights.kernels.table import Kernel, select
from fastweights.ops.product import MOST_ROWS, multiply

OUTPUTS_AT_ONCE = 256
"""Of which the weight is made floats again: few enough that these stay in the cache."""
LARGEST = 127
"""Of an int8, on both sides of 0."""
GROUP = 32
"""Inputs of an output that share a scale and an offset in four bits."""
MOST_CODES = 15
"""The largest number of four bits."""
NEAR = 1e-3
"""Of a step: closer numbers are the same."""
TRIED = 16
"""Groups that are tried first: whether numbers are on steps is so of all of a weight or of none."""
MOST_ROUNDED = 32767
"""Of an int16, on both sides of 0."""
ROUNDED = 18
"""Floats that such a group of tokens takes, rounded."""
GROUPS_AT_ONCE = 8
"""For a multiple of which there is room."""


class CallPlace(NamedTuple):
    """How C makes a product, and where.

    Attributes:
        rows: of tokens
        threads: at most so many
        y: ``[… o]``
        rounded: room for the tokens, rounded
        following: products behind this one, of the same tokens
    """

    rows: int
    threads: int
    y: Tensor
    rounded: Tensor
    following: int


class Int8Weight(NamedTuple):
    """W = scale ⊙ codes.

    Attributes:
        codes: ``[o i]``, int8
        scale: ``[o]``, float32
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """``[o i]`` rounded to the nearest multiple of a scale, by which an output's largest is
        127.
        """
        weight = weight.float()  # in bfloat16, 127 times a scale may be 128
        scale = weight.abs().amax(dim=1) / LARGEST
        scale = scale.where(scale > 0, torch.ones_like(scale))
        return cls((weight / scale[:, None]).round().to(torch.int8), scale)

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    def rows(self, chosen: Any, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs, ``[… i]``."""
        return (self.codes[chosen] * self.scale[chosen][..., None]).to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ with the codes as floats, some outputs after the other."""
        parts = [multiply(x, part.to(x.dtype)) for part in self.codes.split(OUTPUTS_AT_ONCE)]
        return (torch.cat(parts, dim=-1) * self.scale).to(x.dtype)

    def call(self, product: QuantizedProduct, at: CallPlace) -> Any:
        """What C is given of a product with it."""
        codes, scale = self
        sizes = at.rows, self.inputs, len(codes), at.threads
        given = product.x, codes, scale, product.bias, at.y
        return abi.QuantizedProductCall(*sizes, *given, at.following)

    @property
    def function(self) -> str:
        """Of C, which multiplies."""
        return "fw_quantized_product"

    def refuses(self) -> str | None:
        """Why C does not multiply."""
        strange = library.refuse_strangers(self.codes, dtypes=(torch.int8,))
        return strange or library.refuse_tensors(self.scale)


class Int4Weight(NamedTuple):
    """W = scale ⊙ codes + offset, of numbers of four bits in groups of 32 inputs; so GGUF's Q4_0
    and Q4_1 are. What it multiplies is rounded to int16 in such groups, so that sums are integers.

    Attributes:
        codes: ``[o i/2]``, uint8: of 16 bytes, the lower halves are the first 16 inputs of a group
            and the upper ones the others
        scale: ``[o i/32]``, float16
        offset: ``[o i/32]``, float16
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor

    @classmethod
    def ends(cls, groups: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest ``[o i/32]`` of each group ``[o i/32 32]``.

        Raises:
            ValueError: as `of`
        """
        least, largest = groups.aminmax(dim=-1)
        if not (largest - least).half().isfinite().all() or not least.half().isfinite().all():
            raise ValueError(
                f"weights from {least.min():.3g} to {largest.max():.3g} are beyond float16, which"
                " scales of 4 bits are; round them to 8 bits"
            )
        return least, largest

    @classmethod
    def of(cls, weight: Tensor) -> Int4Weight:
        """``[o i]``, i a multiple of 32, rounded to the nearest of 16 numbers between a group's
        least and largest; those that are multiples of a step already, as of GGUF's 4 bits, stay.

        Raises:
            ValueError: for weights that float16 does not hold
        """
        groups = weight.float().unflatten(1, (-1, GROUP))
        least, largest = cls.ends(groups)
        scale, offset = ((largest - least) / _steps(groups)).half(), least.half()
        divisor = scale.float().where(scale > 0, torch.ones_like(scale, dtype=torch.float32))
        codes = (groups - offset.float()[..., None]).div_(divisor[..., None])
        low, high = codes.round_().clamp_(0, MOST_CODES).to(torch.uint8).chunk(2, dim=-1)
        return cls((low | high << 4).flatten(1), scale, offset)

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[1]

    def rows(self, chosen: Any, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs, ``[… i]``."""
        both = self.codes[chosen].unflatten(-1, (-1, GROUP // 2))
        codes = torch.cat([both & MOST_CODES, both >> 4], dim=-1).float()
        scale, offset = (part[chosen].float()[..., None] for part in (self.scale, self.offset))
        return (codes * scale + offset).flatten(-2).to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ with the weights as floats, some outputs after the other."""
        x, starts = round_in_groups(x), range(0, len(self.codes), OUTPUTS_AT_ONCE)
        spans = (slice(start, start + OUTPUTS_AT_ONCE) for start in starts)
        return torch.cat([multiply(x, self.rows(span, x.dtype)) for span in spans], dim=-1)

    def call(self, product: QuantizedProduct, at: CallPlace) -> Any:
        """What C is given of a product with it."""
        codes, scale, offset = self
        sizes = at.rows, self.inputs, len(codes), at.threads
        given = product.x, codes, scale, offset, product.bias, at.y, at.rounded
        return abi.Int4ProductCall(*sizes, *given, at.following)

    @property
    def function(self) -> str:
        """Of C, which multiplies."""
        return "fw_int4_product"

    def refuses(self) -> str | None:
        """Why C does not multiply."""
        strange = library.refuse_strangers(self.codes, dtypes=(torch.uint8,))
        return strange or library.refuse_strangers(self.scale, self.offset, dtypes=(torch.float16,))


def _steps(groups: Tensor) -> Tensor:
    """By how many steps ``[o n]`` from its least to its largest number each group ``[o n 32]`` is
    rounded: 15, or as many as all of its numbers are on already.
    """
    flat, most = groups.flatten(0, 1), groups.new_full(groups.shape[:2], MOST_CODES)
    if not _steps_there(flat[:TRIED]).all():  # weights that nobody has rounded
        return most
    found = _steps_there(flat).view_as(most)
    return most.where(found == 0, found)


def _steps_there(groups: Tensor) -> Tensor:
    """The most steps ``[n]``, at most 15, that all numbers of ``[n 32]`` are on; 0 if none."""
    distance = groups - groups.amin(-1, keepdim=True)
    unit = distance / distance.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    found, left = groups.new_zeros(len(groups)), torch.arange(len(groups), device=groups.device)
    for steps in range(MOST_CODES, 0, -1):
        places = unit[left] * steps
        there = (places - places.round()).abs().amax(-1) < NEAR
        found[left[there]] = steps
        left = left[~there]
    return found


QuantizedWeight = Int8Weight | Int4Weight


def round_in_groups(x: Tensor) -> Tensor:
    """``[… i]`` rounded to the nearest multiple of a scale per 32 inputs, by which the largest is
    32767; gradients pass as if it were not.
    """
    groups = x.detach().float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / MOST_ROUNDED
    codes = (groups / scale.where(scale > 0, torch.ones_like(scale))).round()
    rounded = (codes * scale).flatten(-2).to(x.dtype)
    return x + (rounded - x).detach() if x.requires_grad else rounded


class QuantizedProduct(NamedTuple):
    """x Wᵀ + bias, ``[… o]``.

    Attributes:
        x: ``[… i]``
        weight: W ``[o i]``
        bias: ``[o]``; None: 0
    """

    x: Tensor
    weight: QuantizedWeight
    bias: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it reads."""
        given = (self.x, *self.weight, self.bias)
        return tuple(part for part in given if part is not None)


def multiply_quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """A `QuantizedProduct` by the first kernel that takes it: ``[… o]``."""
    product = QuantizedProduct(x, weight, bias)
    return select(product).compute(product)


def _multiply_rows(product: QuantizedProduct) -> Tensor:
    """By quantized.c or int4.c, which read the codes once."""
    y = torch.empty(*product.x.shape[:-1], len(product.weight.codes))
    library.call(*_call([product], [y]))
    return y


def prepare_quantized_rows(
    products: Sequence[QuantizedProduct], to: Sequence[Tensor]
) -> Callable[[], None] | None:
    """`multiply_quantized` of the same rows, which change where they lie, with weights of one kind,
    into tensors ``[… o]`` that are there; None where C does not take it.
    """
    if any(select(product).compute is not _multiply_rows for product in products):
        return None
    return library.PreparedCall(*_call(products, to))


def _call(products: Sequence[QuantizedProduct], to: Sequence[Tensor]) -> tuple[Any, ...]:
    """The function of C that multiplies, and what it is given."""
    x, weights = products[0].x.contiguous(), [product.weight for product in products]
    inputs, behind = weights[0].inputs, len(products)
    rows, outputs = x.numel() // inputs, sum(len(weight.codes) for weight in weights)
    threads = library.threads(inputs * outputs // 2)
    groups = -(-inputs // (GROUP * GROUPS_AT_ONCE)) * GROUPS_AT_ONCE
    rounded, given = torch.zeros(rows, groups, ROUNDED), []
    for product, y in zip(products, to, strict=True):
        behind -= 1
        at = CallPlace(rows, threads, y, rounded, behind)
        given.append(product.weight.call(product._replace(x=x), at))
    return weights[0].function, *given


def _multiply_floats(product: QuantizedProduct) -> Tensor:
    """With the weight as floats."""
    y = product.weight.multiply(product.x)
    return y if product.bias is None else y + product.bias.to(y.dtype)


def _refuses_rows(product: QuantizedProduct) -> str | None:
    x, weight, bias = product
    if torch.compiler.is_compiling():
        return "a compiled graph makes kernels of torch's own operations"
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return "a tracer or a dispatch mode, such as a counter of operations, looks for torch's own"
    if torch.is_grad_enabled() and any(s.requires_grad for s in product.tensors):
        return "autograd follows it"
    laid_out = all(part.is_contiguous() for part in weight)
    if not laid_out or x.numel() == 0 or x.shape[-1] != weight.inputs:
        return "it is empty, its weight is not contiguous, or its shapes do not fit"
    if x.numel() // x.shape[-1] > MOST_ROWS:
        return f"it has more than {MOST_ROWS} rows"
    return weight.refuses() or library.refuse_tensors(x, bias)


QUANTIZED_KERNELS = [
    Kernel(
        "quantized product of few rows (compiled)",
        QuantizedProduct,
        _multiply_rows,
        _refuses_rows,
        ("cpu",),
        opaque=True,
    ),
    Kernel("quantized product (torch)", QuantizedProduct, _multiply_floats),
]
