"""The product of tokens with a weight of few bits: in C where there are few rows, else by torch.

Tokens are rounded to int16 in the groups of the weight, so that sums within one are of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.table import Kernel, select
from fastweights.ops.product import multiply

OUTPUTS_AT_ONCE = 256
"""Of which the weight is made floats again: few enough that these stay in the cache."""
MOST_ROWS = 128
"""With which C is faster: it unpacks the weight anew for every two."""
LARGEST = 127
"""Of an int8, on both sides of 0."""
GROUP = 32
"""Inputs of an output that share a scale."""
ROUNDED_AT_ONCE = 1 << 22
"""Numbers of a weight."""
LEAST = 1e-3
"""Of the largest number of a weight: scales of less are too coarse in float16."""
MOST_CODES = 15
"""The largest number of four bits."""
NEAR = 1e-3
"""Of a step: closer numbers are the same."""
TRIED = 16
"""Groups that are tried first: whether numbers are on steps is so of all of a weight or of none."""
_MOST_SCALE = torch.finfo(torch.float16).max
MOST_ROUNDED = 32767
"""Of an int16, on both sides of 0."""
ROUNDED = 18
"""Floats that such a group of tokens takes, rounded."""
GROUPS_AT_ONCE = 8
"""For a multiple of which there is room."""


class Int8Weight(NamedTuple):
    """W = scale ⊙ codes, with a scale per output and group of 32 inputs; so GGUF's Q8_0 is.

    Attributes:
        codes: ``[o i]``, int8
        scale: ``[o ⌈i/32⌉]``, float16
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """``[o i]`` rounded to the nearest multiple of a scale, by which a group's largest is 127;
        those that are multiples already, as of GGUF's 8 bits, stay.
        """
        return cls(*_in_parts(cls._of, weight))

    @classmethod
    def _of(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        inputs, groups = weight.shape[1], _in_groups(weight.float())
        scale = (groups.abs().amax(-1) / LARGEST).half()
        codes = (groups / _divisor(scale)).round_().clamp_(-LARGEST, LARGEST)
        return codes.to(torch.int8).flatten(1)[:, :inputs].contiguous(), scale

    @classmethod
    def room(cls, outputs: int, inputs: int) -> Int8Weight:
        """For a weight that is loaded, on the meta device."""
        codes = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
        return cls(codes, codes.new_empty(outputs, -(-inputs // GROUP), dtype=torch.float16))

    @classmethod
    def holds(cls, weight: Tensor) -> bool:
        """Whether scales of float16 reach its numbers and are precise enough for the largest."""
        return _is_between(weight, LEAST, LARGEST * _MOST_SCALE)

    @property
    def offset(self) -> None:
        """There is none."""

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    def rows(self, chosen: Any, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs, ``[… i]``."""
        groups = _in_groups(self.codes[chosen].float()) * self.scale[chosen].float()[..., None]
        return groups.flatten(-2)[..., : self.inputs].to(dtype)

    @property
    def function(self) -> str:
        """Of C, which multiplies."""
        return "fw_int8_product"

    def refuses(self) -> str | None:
        """Why C does not multiply."""
        strange = library.refuse_strangers(self.codes, dtypes=(torch.int8,))
        return strange or library.refuse_strangers(self.scale, dtypes=(torch.float16,))


class Int4Weight(NamedTuple):
    """W = scale ⊙ codes + offset, of numbers of four bits in groups of 32 inputs; so GGUF's Q4_0
    and Q4_1 are.

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
    def of(cls, weight: Tensor) -> Int4Weight:
        """``[o i]``, i a multiple of 32, rounded to the nearest of 16 numbers between a group's
        least and largest; those that are multiples of a step already, as of GGUF's 4 bits, stay.
        """
        return cls(*_in_parts(cls._of, weight))

    @classmethod
    def _of(cls, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = _in_groups(weight.float())
        least, largest = groups.aminmax(dim=-1)
        scale, offset = ((largest - least) / _steps(groups)).half(), least.half()
        codes = (groups - offset.float()[..., None]).div_(_divisor(scale))
        low, high = codes.round_().clamp_(0, MOST_CODES).to(torch.uint8).chunk(2, dim=-1)
        return (low | high << 4).flatten(1), scale, offset

    @classmethod
    def room(cls, outputs: int, inputs: int) -> Int4Weight:
        """For a weight that is loaded, on the meta device."""
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
        scale = codes.new_empty(outputs, inputs // GROUP, dtype=torch.float16)
        return cls(codes, scale, scale.clone())

    @classmethod
    def holds(cls, weight: Tensor) -> bool:
        """Whether scales and offsets of float16 reach its numbers and are precise enough, and
        groups are filled.
        """
        return weight.shape[1] % GROUP == 0 and _is_between(weight, LEAST, _MOST_SCALE / 2)

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[1]

    def rows(self, chosen: Any, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs, ``[… i]``."""
        both = self.codes[chosen].unflatten(-1, (-1, GROUP // 2))
        codes = torch.cat([both & MOST_CODES, both >> 4], dim=-1).float()
        scale, offset = (part[chosen].float()[..., None] for part in (self.scale, self.offset))
        return (codes * scale + offset).flatten(-2).to(dtype)

    @property
    def function(self) -> str:
        """Of C, which multiplies."""
        return "fw_int4_product"

    def refuses(self) -> str | None:
        """Why C does not multiply."""
        strange = library.refuse_strangers(self.codes, dtypes=(torch.uint8,))
        return strange or library.refuse_strangers(self.scale, self.offset, dtypes=(torch.float16,))


QuantizedWeight = Int8Weight | Int4Weight


def _in_parts(of: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> Iterator[Tensor]:
    """What is made of a weight ``[o i]``, of some outputs after the other, as there may be many."""
    made = map(of, weight.split(max(1, ROUNDED_AT_ONCE // weight.shape[1])))
    return map(torch.cat, zip(*made, strict=True))


def _is_between(weight: Tensor, least: float, most: float) -> bool:
    """Whether its largest number is, or it is 0."""
    largest = torch.stack(weight.aminmax()).abs().amax()
    return bool((largest == 0) | (largest >= least) & (largest <= most))


def _in_groups(values: Tensor) -> Tensor:
    """``[… i]`` as ``[… ⌈i/32⌉ 32]``, the last filled with zeros."""
    return F.pad(values, (0, -values.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _divisor(scale: Tensor) -> Tensor:
    """``[… 1]``, by which what has this scale is divided; 1 where all of it is 0."""
    return scale.float().where(scale > 0, torch.ones_like(scale, dtype=torch.float32))[..., None]


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


def round_in_groups(x: Tensor) -> Tensor:
    """``[… i]`` rounded to the nearest multiple of a scale per 32 inputs, by which the largest is
    32767; gradients pass as if it were not.
    """
    groups = _in_groups(x.detach().float())
    scale = groups.abs().amax(-1) / MOST_ROUNDED
    codes = (groups / _divisor(scale)).round()
    rounded = (codes * scale[..., None]).flatten(-2)[..., : x.shape[-1]].to(x.dtype)
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
    """By quantized.c, which reads the codes once."""
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
    inputs, outputs = weights[0].inputs, [len(weight.codes) for weight in weights]
    rows, groups = x.numel() // inputs, -(-inputs // (GROUP * GROUPS_AT_ONCE)) * GROUPS_AT_ONCE
    threads = library.threads(inputs * sum(outputs) // 2)
    rounded, given = torch.zeros(rows, groups, ROUNDED), []
    for behind, product, y in zip(reversed(range(len(to))), products, to, strict=True):
        weight, sizes = product.weight, (rows, inputs, len(product.weight.codes), threads)
        stored = weight.codes, weight.scale, weight.offset
        given.append(abi.QuantizedProductCall(*sizes, x, *stored, product.bias, y, rounded, behind))
    return weights[0].function, *given


def _multiply_floats(product: QuantizedProduct) -> Tensor:
    """With the weight as floats, some outputs after the other."""
    x, weight, bias = round_in_groups(product.x), product.weight, product.bias
    starts = range(0, len(weight.codes), OUTPUTS_AT_ONCE)
    spans = (slice(start, start + OUTPUTS_AT_ONCE) for start in starts)
    y = torch.cat([multiply(x, weight.rows(span, x.dtype)) for span in spans], dim=-1)
    return y if bias is None else y + bias.to(y.dtype)


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
