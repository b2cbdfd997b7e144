"""Graphs that compute with complex numbers, as graphs of their real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def unguarded(program: ExportedProgram) -> nn.Module:
    """The module of a traced program, without checks of its inputs, which torch 2.8 has none of."""
    guarded = "check_guards" in signature(program.module).parameters
    return program.module(check_guards=False) if guarded else program.module()


class InPairs(nn.Module):
    """A traced program without complex numbers inside: it takes and returns what the program does,
    which is real.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.traced = unguarded(program)

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        for state in past:  # of as many sequences, which the traced program only asked of itself
            torch._check(state.shape[0] == input_ids.shape[0])
        return _Parts(self.traced).run(input_ids, *past)


def is_complex(program: ExportedProgram) -> bool:
    """Whether a program computes with complex numbers somewhere."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    values = (node.meta.get("val") for module in modules for node in module.graph.nodes)
    leaves = (leaf for value in values for leaf in pytree.tree_leaves(value))
    return any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves)


@dataclass(frozen=True)
class Pair:
    """A complex tensor as two real ones."""

    real: Tensor
    imag: Tensor

    @property
    def reciprocal(self) -> Pair:
        size = self.real.square() + self.imag.square()
        return Pair(self.real / size, -self.imag / size)


class _Parts(Interpreter):
    """Runs a graph whose complex values are `Pair`s."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        if isinstance(found, Tensor) and found.is_complex():
            return Pair(found.real, found.imag)
        return found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        packet = getattr(target, "overloadpacket", target)
        if not any(isinstance(leaf, Pair | complex) for leaf in leaves):
            makes = packet in _MAKING or any(map(_is_complex_dtype, leaves))
            if not makes or packet not in _OPERATORS:
                return super().call_function(target, args, kwargs)
        if target is scan_op:
            return _scan(*args)
        if packet not in _OPERATORS:
            raise TypeError(f"{target} of complex numbers has no form in pairs of real ones")
        return _OPERATORS[packet](target, *args, **kwargs)


def _is_complex_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_complex


def _scan(
    combine: GraphModule, init: Sequence[Any], xs: Sequence[Any], fixed: Sequence[Any]
) -> list[Any]:
    """A loop whose carried values, inputs and outputs may be pairs."""
    kinds = [isinstance(value, Pair) for value in (*init, *xs, *fixed)]
    results: list[bool] = []

    def step(*parts: Any) -> list[Tensor]:
        found = _Parts(combine).run(*_joined(parts, kinds))
        results[:] = [isinstance(value, Pair) for value in found]
        return [part.clone() for part in _split(found)]

    return _joined(scan_op(step, _split(init), _split(xs), tuple(_split(fixed))), results)


def _split(values: Sequence[Any]) -> list[Any]:
    """Pairs as two values each."""
    parts = ((v.real, v.imag) if isinstance(v, Pair) else (v,) for v in values)
    return [part for each in parts for part in each]


def _joined(parts: Sequence[Any], paired: Sequence[bool]) -> list[Any]:
    """The values that `_split` made these of."""
    rest: Iterator[Any] = iter(parts)
    return [Pair(next(rest), next(rest)) if pair else next(rest) for pair in paired]


def _each(f: Any, *args: Any, **kwargs: Any) -> Any:
    """Of an operator that only moves numbers, or adds those of one tensor."""
    real, imag = (
        f(*_map(args, lambda pair, part=part: getattr(pair, part)), **kwargs)
        for part in ("real", "imag")
    )
    return _zip(real, imag)


def _map(args: Any, f: Callable[[Pair], Any]) -> Any:
    return pytree.tree_map(lambda a: f(a) if isinstance(a, Pair) else a, args)


def _zip(real: Any, imag: Any) -> Any:
    if isinstance(real, Tensor):
        return Pair(real, imag)
    return [Pair(*parts) for parts in zip(real, imag, strict=True)]


def _real(value: Any) -> Any:
    return value.real if isinstance(value, Pair | complex) else value


def _imag(value: Any) -> Any:
    if isinstance(value, Pair | complex):
        return value.imag
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0.0


def _sum(f: Any, a: Any, b: Any, **kwargs: Any) -> Pair:
    return Pair(f(_real(a), _real(b), **kwargs), f(_imag(a), _imag(b), **kwargs))


def _concatenation(f: Any, tensors: Sequence[Any], *dim: int) -> Pair:
    return Pair(f([*map(_real, tensors)], *dim), f([*map(_imag, tensors)], *dim))


def _choice(f: Any, chosen: Tensor, a: Any, b: Any) -> Pair:
    return Pair(f(chosen, _real(a), _real(b)), f(chosen, _imag(a), _imag(b)))


def _filling(f: Any, x: Any, mask: Tensor, value: Any) -> Pair:
    return Pair(f(_real(x), mask, _real(value)), f(_imag(x), mask, _imag(value)))


def _product(f: Any, a: Any, b: Any) -> Pair:
    """Of something that is linear in both, such as a product of matrices."""
    if not isinstance(a, Pair | complex):
        return Pair(f(a, b.real), f(a, b.imag))
    if not isinstance(b, Pair | complex):
        return Pair(f(a.real, b), f(a.imag, b))
    return Pair(f(a.real, b.real) - f(a.imag, b.imag), f(a.real, b.imag) + f(a.imag, b.real))


def _quotient(f: Any, a: Any, b: Any) -> Pair:
    if not isinstance(b, Pair):
        return Pair(f(a.real, b), f(a.imag, b))
    return _product(torch.mul, a, b.reciprocal)


def _exp(_: Any, x: Pair) -> Pair:
    size = x.real.exp()
    return Pair(size * x.imag.cos(), size * x.imag.sin())


def _conjugate(_: Any, x: Pair) -> Pair:
    return Pair(x.real, -x.imag)


def _to(f: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Conversions: of real numbers to complex ones, of those to others, or to their real parts."""
    real = [a.to_real() if isinstance(a, torch.dtype) else a for a in args]
    named = {n: a.to_real() if isinstance(a, torch.dtype) else a for n, a in kwargs.items()}
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    part = f(_real(x), *real, **named)
    if dtypes and not dtypes[0].is_complex:
        return part
    return Pair(part, f(_imag(x), *real, **named))


_MOVING = (
    *("alias", "chunk", "clone", "constant_pad_nd", "contiguous", "cumsum", "detach", "expand"),
    *("flatten", "flip", "index", "index_select", "lift_fresh_copy", "movedim", "mT", "narrow"),
    *("neg", "numpy_T", "pad", "permute", "repeat", "repeat_interleave", "reshape", "roll"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "sum", "transpose", "tril"),
    *("triu", "unbind", "unflatten", "unsqueeze", "view", "new_zeros", "zeros_like"),
)
_MAKING = {aten.complex, aten.view_as_complex}
"""Operators that make complex numbers of real ones, and do not say so in their arguments."""
_OPERATORS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((getattr(aten, name) for name in _MOVING), _each),
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _sum),
    **dict.fromkeys((aten.cat, aten.stack), _concatenation),
    **dict.fromkeys((aten.mul, aten.matmul, aten.bmm), _product),
    **dict.fromkeys((aten.conj, aten._conj, aten.conj_physical), _conjugate),
    **dict.fromkeys((aten.resolve_conj, aten.resolve_neg), lambda _, x: x),
    **dict.fromkeys((aten.to, aten._to_copy), _to),
    aten.div: _quotient,
    aten.where: _choice,
    aten.masked_fill: _filling,
    aten.exp: _exp,
    aten.reciprocal: lambda _, x: x.reciprocal,
    aten.abs: lambda _, x: (x.real.square() + x.imag.square()).sqrt(),
    aten.complex: lambda _, real, imag: Pair(*torch.broadcast_tensors(real, imag)),
    aten.view_as_complex: lambda _, x: Pair(*x.unbind(-1)),
    aten.view_as_real: lambda _, x: torch.stack([x.real, x.imag], -1),
    aten.real: lambda _, x: x.real,
    aten.imag: lambda _, x: x.imag,
    getitem: lambda f, values, index: f(values, index),
    aten.sym_size: lambda f, x, dim: f(x.real, dim),
    aten._assert_tensor_metadata: lambda *_, **__: None,
}
"""By operators, functions of the one overload that a graph has, and of what it is called with."""
