"""What every evaluation of a recurrence is held to: the oracle's numbers and the definition's
gradients.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from cases import Case, Shape, State, Streams, cast, each, normal, parts
from fastweights.methods import Auto, Chunkwise, Method, Recurrent, evaluate
from tolerances import array, assert_close


def oracle(case: Case, streams: Streams, state: State | None = None) -> tuple[np.ndarray, Any]:
    """(o, final state) by the literal loops, on the very numbers that `streams` hold."""
    arrays = {name: array(s) for name, s in streams.items()}
    if state is None:
        return case.oracle(**arrays)
    given = tuple(array(s) for s in state) if isinstance(state, tuple) else array(state)
    return case.oracle(**arrays, state=given)


def check(
    case: Case, streams: Streams, state: State | None, dtype: torch.dtype, *methods: Method
) -> None:
    """The methods agree with the oracle in output and state."""
    want, want_final = oracle(case, streams, state)
    for method in methods:
        o, final = evaluate(case.rule(**streams), state, method)
        assert_close(o, want, f"o of {method}", dtype)
        if want_final is not None:
            check_states(case.plain(final), as_tensors(want_final), dtype)


def as_tensors(state: Any) -> State:
    return tuple(torch.as_tensor(s) for s in parts(state))


def check_states(got: State, want: State, dtype: torch.dtype) -> None:
    for number, (a, b) in enumerate(zip(parts(got), parts(want), strict=True)):
        assert_close(a, b, f"state {number}", dtype)


def weighted(x: Tensor, seed: int) -> Tensor:
    """A fixed random functional of x, real."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros(())
    real = torch.view_as_real(x) if x.is_complex() else x
    weights = normal(*real.shape, generator=Generator().manual_seed(seed))
    return (real * weights.to(real.dtype)).sum()


def gradients(case: Case, streams: Streams, state: State, method: Method) -> dict[str, Tensor]:
    """d loss / d (each stream, each part of the initial state), through the outputs and the final
    state.
    """
    leaves = {name: s.detach().requires_grad_() for name, s in streams.items()}
    start = [
        s.detach().requires_grad_(s.is_floating_point() or s.is_complex()) for s in parts(state)
    ]
    given = tuple(start) if isinstance(state, tuple) else start[0]
    o, final = evaluate(case.rule(**leaves), case.adjust(given), method)
    loss = weighted(o, 0) + sum(weighted(s, 1 + i) for i, s in enumerate(parts(case.plain(final))))
    wanted = leaves | {
        f"state {i}": s for i, s in enumerate(start) if s.requires_grad and s.numel()
    }
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def check_gradients(
    case: Case, streams: Streams, state: State, dtype: torch.dtype, *methods: Method
) -> None:
    """The methods have, in `dtype`, the gradients that the definition has in float64."""
    wide = {name: cast(s, torch.float64) for name, s in streams.items()}
    want = gradients(case, wide, each(state, lambda s: cast(s, torch.float64)), Recurrent())
    for method in methods:
        for name, gradient in gradients(case, streams, state, method).items():
            assert_close(gradient, want[name], f"gradient of {name} by {method}", dtype)


def some_tokens(streams: Streams, rows: slice, tokens: Any = slice(None)) -> Streams:
    """Of streams that may be constant over the batch, in time, or both."""

    def some(stream: Tensor) -> Tensor:
        if stream.dim() != 4:
            return stream
        stream = stream[rows] if stream.shape[0] > 1 else stream
        return stream[:, tokens] if stream.shape[1] > 1 else stream

    return {name: some(stream) for name, stream in streams.items()}


def check_padding(case: Case, shape: Shape, state: State, mask: Tensor, *, states: bool) -> None:
    """Outputs, what follows, and states if they are compared, are as if padding were absent."""
    streams, more = case.streams(shape), case.streams(replace(shape, t=3), seed=9)
    for method in (Recurrent(), Chunkwise(4), Auto()):
        o, final = evaluate(case.rule(**streams).keep(mask), state, method)
        continued, _ = evaluate(case.rule(**more), final, method)
        assert torch.isfinite(o).all()
        for row, kept in enumerate(mask):
            alone = slice(row, row + 1)
            tokens = case.rule(**some_tokens(streams, alone, kept))
            want, end = evaluate(tokens, each(state, lambda s, one=alone: s[one]), Recurrent())
            assert_close(o[alone, kept], want, "o")
            follow = case.rule(**some_tokens(more, alone))
            assert_close(continued[alone], evaluate(follow, end, Recurrent())[0], "continuation")
            if states:
                found = each(case.plain(final), lambda s, one=alone: s[one])
                check_states(found, case.plain(end), torch.float64)


PACKED = torch.tensor([[7, 7, 7, 2, 5, 5, 5, 5, 5, 7, 7]])
"""Numbers of documents."""


def check_documents(case: Case, state: State | None, *, states: bool) -> None:
    """Documents of one sequence, the first of which goes on from `state`, are as if alone."""
    shape = Shape(b=1, t=11)
    streams, more = case.streams(shape), case.rule(**case.streams(replace(shape, t=9), seed=9))
    for method in (Recurrent(), Chunkwise(4), Auto()):
        o, final = evaluate(case.rule(**streams).segments(PACKED), state, method)
        end = state
        for start, stop in pairwise((0, 3, 4, 9, 11)):
            document = case.rule(**some_tokens(streams, slice(None), slice(start, stop)))
            want, end = evaluate(document, state if start == 0 else None, Recurrent())
            assert_close(o[:, start:stop], want, "o")
        got, want = evaluate(more, final, method)[0], evaluate(more, end, Recurrent())[0]
        assert_close(got, want, "continuation")
        if states:
            check_states(case.plain(final), case.plain(end), torch.float64)
