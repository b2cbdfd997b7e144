"""Every rule in slices of time on several processes, beside the same rule on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Generator, Tensor, distributed

from beside import beside_window
from cases import CASES, WITHOUT_EFFECT, Case, Shape, Streams, cast, each, parts
from fastweights.methods import Auto, Chunkwise, Method, evaluate
from fastweights.parallel import HeadSharded, HybridSharded, TimeSharded
from fastweights.recurrence import Recurrence, Substeps
from processes import Report, total
from tolerances import error

LENGTH, MORE = 24, 3
"""Tokens of the sequences, and of what follows them."""
SHAPE = Shape(b=2, t=LENGTH + MORE, h=8)
MASK = torch.rand(2, SHAPE.t, generator=Generator().manual_seed(2)) < 0.7
IDS = torch.tensor([[0] * 6 + [1] * 3 + [2] * 18, [0] * 12 + [1] * 1 + [2] * 14])
"""Documents, some of which begin where a slice does."""

View = Callable[[Recurrence], Recurrence]
VIEWS: dict[str, View] = {
    "plain": lambda record: record,
    "both": lambda record: record.keep(MASK).segments(IDS),
}
METHODS: dict[str, Callable[..., Method]] = {
    "time": TimeSharded,
    "heads": HeadSharded,
    "hybrid": HybridSharded,
}


def hold(case: Case, name: str) -> Case:
    """The case with a stream that is constant in time, and the same for all sequences."""
    draw = case.draws[name]
    return replace(
        case,
        name=f"{case.name}-held-{name}",
        draws={**case.draws, name: lambda s, g: draw(s, g)[:1, :1]},
    )


def share(case: Case, name: str) -> Case:
    """The case with a stream that is the same for all heads."""
    draw = case.draws[name]
    return replace(
        case,
        name=f"{case.name}-shared-{name}",
        draws={**case.draws, name: lambda s, g: draw(s, g)[:, :, :1]},
    )


def take_twice(w: Tensor, v: Tensor, a: Tensor, **streams: Tensor) -> Substeps:
    """Two steps per token, the second with keys and values turned around."""
    return Substeps.of(w=_twice(w), v=_twice(v), a=_twice(a), **streams)


def _twice(stream: Tensor) -> Tensor:
    return torch.stack([stream, -stream.flip(-1)], 2)


BY_NAME = {case.name: case for case in CASES}
RULES = [
    *CASES,
    hold(BY_NAME["decay-vector"], "log_decay"),
    hold(BY_NAME["selective"], "rate"),
    hold(BY_NAME["decay-complex"], "k"),
    share(BY_NAME["mesa-scalar"], "q"),
    share(BY_NAME["selective"], "k"),
    share(BY_NAME["softmax-window"], "k"),
    beside_window("gla", 5),
    beside_window("kda", 3, 2),
    replace(BY_NAME["dplr-one-key"], name="substeps", rule=take_twice),
]


Variant = tuple[str, torch.dtype, Case, str]


def variants(count: int) -> Iterator[Variant]:
    """(method, dtype, rule, view): every rule by every method on two processes, those whose state
    travels on more.
    """
    for case in RULES:
        if case.name not in WITHOUT_EFFECT:
            yield "time", torch.float64, case, "both"
        if count == 2:
            yield "heads", torch.float64, case, "both"


def rounded_variants() -> Iterator[Variant]:
    """Every rule in float32, by the tokens and by the heads."""
    for case in RULES:
        finite = case.name not in WITHOUT_EFFECT
        yield "time" if finite else "hybrid", torch.float32, case, "plain"
        yield "heads", torch.float32, case, "plain"


def compare(method: str, dtype: torch.dtype, case: Case, view: str) -> float:
    """The largest relative error of outputs, of those of the tokens that follow, and of all
    gradients.
    """
    count, index = distributed.get_world_size(), distributed.get_rank()
    span = slice(index * LENGTH // count, (index + 1) * LENGTH // count)
    sharded = METHODS[method](distributed.group.WORLD)
    ours = _Run(case, dtype, VIEWS[view], state=view == "both")
    whole = _Run(case, dtype, VIEWS[view], state=view == "both")
    o, more = ours.read(span, sharded)
    o_whole, more_whole = whole.read(slice(0, LENGTH), Auto())
    # what follows is read by every process alike: its share of the sum is one of `count`
    torch.autograd.backward([ours.weigh(o, span), ours.weigh_more(more) / count])
    torch.autograd.backward([whole.weigh(o_whole, slice(0, LENGTH)), whole.weigh_more(more_whole)])
    pairs = [(o.detach(), o_whole[:, span].detach()), (more.detach(), more_whole.detach())]
    pairs += [(total(a), b) for a, b in zip(ours.gradients(), whole.gradients(), strict=True)]
    return max(error(got, want) for got, want in pairs)


class _Run:
    """Streams and a state with gradients, read in one way."""

    def __init__(self, case: Case, dtype: torch.dtype, view: View, *, state: bool) -> None:
        self.case, self.view = case, view
        self.streams: Streams = {
            n: s.requires_grad_() for n, s in case.streams(SHAPE, dtype).items()
        }
        self.start = each(case.start(SHAPE, dtype), _require_grad) if state else None
        self.leaves = [*self.streams.values(), *([] if self.start is None else parts(self.start))]

    def read(self, span: slice, method: Method) -> tuple[Tensor, Tensor]:
        """The outputs of the tokens in `span`, and of those behind all."""
        record = self.view(self.case.rule(**self.streams))
        start = None if self.start is None else self.case.adjust(self.start)
        o, state = evaluate(record[span], start, method)
        more, _ = evaluate(record[LENGTH:], state, Chunkwise(2))
        return o, more

    def weigh(self, o: Tensor, span: slice) -> Tensor:
        return _weighted(o, _weights(o.dtype)[:, span])

    def weigh_more(self, o: Tensor) -> Tensor:
        return _weighted(o, _weights(o.dtype)[:, LENGTH:])

    def gradients(self) -> list[Tensor]:
        return [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in self.leaves
            if leaf.requires_grad
        ]


def _weights(dtype: torch.dtype) -> Tensor:
    shape = (SHAPE.b, SHAPE.t, SHAPE.h, SHAPE.v)
    return cast(torch.randn(shape, generator=Generator().manual_seed(3)), dtype)


def _weighted(o: Tensor, weights: Tensor) -> Tensor:
    return (torch.view_as_real(o)[..., 0] * weights.real if o.is_complex() else o * weights).sum()


def _require_grad(x: Tensor) -> Tensor:
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x


def compare_rules() -> Report:
    """The errors of all variants."""
    return _compare_all(variants(distributed.get_world_size()))


def compare_some_rules() -> Report:
    """The errors of one variant in three."""
    return _compare_all(islice(variants(distributed.get_world_size()), 0, None, 3))


def compare_rounded_rules() -> Report:
    """The errors in float32."""
    return _compare_all(rounded_variants())


def _compare_all(found: Iterable[Variant]) -> Report:
    return {
        f"{method}, {dtype}, {case}, {view}": compare(method, dtype, case, view)
        for method, dtype, case, view in found
    }
