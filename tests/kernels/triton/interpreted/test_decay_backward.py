"""The backward of `Decay` in chunks: what is asked for of it, and its parts under two readers. How
its gradients agree with the definition's is in `test_decay`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.kernels.triton.anchored import Given, Reader, anchor, release, steep_scores
from fastweights.kernels.triton.chunks import Chunks, chunk_states
from fastweights.kernels.triton.decay import TRITON_DECAY
from fastweights.kernels.triton.decay_backward import (
    reader_gradients,
    value_gradients,
)
from fastweights.recurrence import Decay
from poison import poisoned_memory
from triton_checks import TOLERANCE, Streams, check, relative

pytestmark = pytest.mark.sampled


def make(t: int, k: int, v: int, decay: int | None, *, h: int = 1) -> dict[str, Tensor | None]:
    """Random streams in float64; `decay` is the width of log α, which is mild in some channels,
    steep in others, and resets.
    """
    torch.manual_seed(t)
    log_decay = None
    if decay is not None:
        log_decay = -0.2 * torch.rand(1, t, h, decay, dtype=torch.float64)
        log_decay *= 10 ** (3 * torch.rand(1, 1, h, decay, dtype=torch.float64))
        log_decay[:, 5::37] = -torch.inf
    return {
        "q": torch.randn(1, t, h, k, dtype=torch.float64),
        "k": torch.randn(1, t, h, k, dtype=torch.float64),
        "v": torch.randn(1, t, h, v, dtype=torch.float64),
        "log_decay": log_decay,
    }


def build(streams: Streams) -> Decay:
    return Decay(**streams)  # type: ignore[arg-type]


def differentiate(streams: Streams, start: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    """The gradients of the named streams, in float32 and from the same upstream ones."""
    leaves = {n: None if s is None else s.float().detach() for n, s in streams.items()}
    leaves["start"] = start.clone()
    wanted = [s.requires_grad_() for n in names if (s := leaves[n]) is not None]
    start = leaves.pop("start")
    with poisoned_memory():
        o, last = TRITON_DECAY.compute(build(leaves), start)
        return list(torch.autograd.grad((o.cos().sum() + last.sin().sum()), wanted))


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [(None, torch.float32), (1, torch.float16), (72, torch.float32), (72, torch.bfloat16)],
)
def test_states_may_be_wider_than_tiles(decay: int | None, dtype: torch.dtype) -> None:
    t, width = (34, 40) if dtype == torch.float32 else (66, 72)
    check(TRITON_DECAY, build, make(t, width, width, decay and min(decay, width)), dtype)


@pytest.mark.parametrize("decay", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_which_are_asked_for(decay: int) -> None:
    streams, names = make(34, 16, 16, decay), ("q", "k", "v", "log_decay", "start")
    start = torch.randn(1, 1, 16, 16)
    found = differentiate(streams, start, names)
    again = differentiate(streams, start, names)
    for name, gradient, repeated in zip(names, found, again, strict=True):
        assert torch.equal(gradient, repeated), name
        (alone,) = differentiate(streams, start, (name,))
        assert torch.equal(gradient, alone), name


def read_twice(
    e: Tensor, streams: dict[str, Tensor | None], start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(what q reads after each token is written, what e reads before it, the last state)."""
    record, state, after, before = build(streams), start, [], []
    for t in range(len(record)):
        token = record[t : t + 1]
        nothing = torch.zeros_like(token.key)
        before.append(Decay(e[:, t : t + 1], nothing, token.v, token.log_decay).step(state)[0])
        o, state = token.step(state)
        after.append(o)
    return torch.cat(after, 1), torch.cat(before, 1), state


@pytest.mark.parametrize(
    ("decay", "dtype"), [(None, torch.float32), (1, torch.bfloat16), (20, torch.float32)]
)
def test_a_second_reader_adds_to_the_gradients_of_the_first(
    decay: int | None, dtype: torch.dtype
) -> None:
    streams = make(40, 20, 24, decay)
    rounded = {
        n: None if s is None else s.to(torch.float32 if n == "log_decay" else dtype)
        for n, s in streams.items()
    }
    e = torch.randn(1, 40, 1, 20).to(dtype)
    d_o, d_y = torch.randn(2, 1, 40, 1, 24).to(dtype)
    start, d_final = torch.randn(2, 1, 1, 20, 24)

    exact = {n: None if s is None else s.double().requires_grad_() for n, s in rounded.items()}
    rows, before = e.double().requires_grad_(), start.double().requires_grad_()
    o, y, last = read_twice(rows, exact, before)
    ((o * d_o).sum() + (y * d_y).sum() + (last * d_final).sum()).backward()

    q, k, v, g = (rounded[n] for n in ("q", "k", "v", "log_decay"))
    assert q is not None
    assert k is not None
    assert v is not None
    chunks = Chunks.of(q, v, dtype)
    with poisoned_memory():
        given = Given(q, e, k, g)
        a = anchor(given, chunks)
        assert a.q is not None
        assert a.e is not None
        states, _ = chunk_states(start, v, a, chunks)
        d_states, d_start = chunk_states(d_final, d_o, a, chunks, reverse=True)
        second, nothing = a._replace(q=a.e), torch.zeros_like(d_final)
        more, d_start_more = chunk_states(nothing, d_y, second, chunks, reverse=True)
        d_states += more
        by_q = reader_gradients(a.q, v, a, d_o, states, d_states, chunks, strict=False)
        by_e = reader_gradients(a.e, v, a, d_y, states, None, chunks, strict=True, before=by_q)
        scores = steep_scores(q, given, a.steep, chunks, strict=False)
        d_v = value_gradients(a.q, v, a, d_o, scores, d_states, chunks, strict=False)
        scores = steep_scores(e, given, a.steep, chunks, strict=True)
        nothing = torch.zeros_like(d_states)
        d_v = d_v + value_gradients(a.e, v, a, d_y, scores, nothing, chunks, strict=True)
        gradients = Given(by_q.rows, by_e.rows, by_e.k, by_e.log_decay)
        if a.steep is not None:
            readers = Reader(q, v, d_o, False), Reader(e, v, d_y, True)
            gradients = release(readers, given, (by_q, by_e), a, chunks, (True,) * 4)
    found = {"q": gradients.q, "k": gradients.k, "v": d_v, "log_decay": gradients.log_decay}
    pairs = [(found[n], s.grad) for n, s in exact.items() if s is not None]
    pairs += [(gradients.e, rows.grad), (d_start + d_start_more, before.grad)]
    for gradient, wanted in pairs:
        assert gradient is not None
        assert wanted is not None
        assert relative(gradient, wanted) <= TOLERANCE[dtype]
