"""A network that learns from every token, beside the paper's loop and torch's own gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from cases import METHODS, normal
from checks import as_tensors, check_states
from fastweights import kernels
from fastweights.methods import Chunkwise, Method, evaluate
from fastweights.recurrence import TTT, NoFiniteFormError, ShapeError
from oracles.ttt import ttt
from tolerances import array, assert_close

B, T, H, K = 2, 37, 2, 6


def streams(t: int = T, hidden: tuple[int, ...] = ()) -> dict[str, Tensor]:
    g = Generator().manual_seed(0)
    widths = (K, *hidden, K)
    numbers = sum((i + 1) * o for i, o in pairwise(widths))
    return {
        **{name: normal(B, t, H, K, generator=g) for name in "qkv"},
        "rate": normal(B, t, H, 1, generator=g).sigmoid() / K,
        "scale": normal(B, t, H, 1, generator=g).sigmoid(),
        "start": 0.5 * normal(H, numbers, generator=g),
        "gain": normal(H, K, generator=g),
        "shift": normal(H, K, generator=g),
    }


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("hidden", [(), (5, 4)], ids=str)
def test_networks_of_any_depth_are_the_loop(hidden: tuple[int, ...], method: Method) -> None:
    named = streams(hidden=hidden)
    arrays: dict[str, Any] = {name: array(s) for name, s in named.items()}
    o, final = evaluate(TTT(**named, hidden=hidden), method=method)
    want, after = ttt(**arrays, hidden=hidden)
    assert_close(o, want, "o")
    check_states(final, as_tensors(after), torch.float64)


def test_the_first_step_goes_down_the_gradient_of_the_loss() -> None:
    named = streams(t=1)
    record = TTT(**named, size=1)
    start = named["start"].view(H, K + 1, K).expand(B, -1, -1, -1).clone().requires_grad_()
    k, v = (named[name].transpose(1, 2) for name in "kv")
    y = k @ start[:, :, :-1] + start[:, :, -1:]
    normed = F.layer_norm(y, (K,), eps=1e-6) * named["gain"][:, None] + named["shift"][:, None]
    (slope,) = torch.autograd.grad(((k + normed - v) ** 2).sum() / 2, start)
    step = (named["scale"] * named["rate"]).transpose(1, 2)
    assert_close(evaluate(record)[1][0], -step * slope, "W - W_0")


def test_sequences_at_different_places_of_their_minibatches_go_on_together() -> None:
    named, lengths = streams(), (5, 18)
    tokens = {name: s for name, s in named.items() if s.dim() == 4}
    fixed = {name: s for name, s in named.items() if s.dim() == 2}

    def part(row: int, span: slice) -> dict[str, Tensor]:
        return {name: s[row : row + 1, span] for name, s in tokens.items()}

    early = [evaluate(TTT(**part(i, slice(n)), **fixed))[1] for i, n in enumerate(lengths)]
    rest = [part(i, slice(n, n + 17)) for i, n in enumerate(lengths)]
    batch = TTT(**{n: torch.cat([one[n] for one in rest]) for n in tokens}, **fixed)
    o, _ = evaluate(batch, tuple(map(torch.cat, zip(*early, strict=True))), Chunkwise(7))
    whole, _ = evaluate(TTT(**named))
    for row, n in enumerate(lengths):
        assert_close(o[row], whole[row, n : n + 17], f"o of sequence {row}")


def test_a_document_that_is_all_padding_leaves_an_empty_state() -> None:
    record = TTT(**streams())
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[:, 30] = True
    padded = record.keep(~starts.cummax(1).values).restart(starts)
    for method in METHODS:
        _, state = evaluate(padded, method=method)
        assert all((part == 0).all() for part in state)


def test_whole_records_are_read_minibatch_by_minibatch() -> None:
    assert kernels.select(TTT(**streams())).name == "minibatches in turn (torch)"


def test_it_has_neither_a_map_nor_a_system() -> None:
    record = TTT(**streams())
    with pytest.raises(NoFiniteFormError, match="not linear in its values"):
        record.attention_map()
    with pytest.raises(NoFiniteFormError, match="not linear in the state before it"):
        record.ltv()


@pytest.mark.usefixtures("unchecked")
def test_records_that_do_not_fit() -> None:
    record = TTT(**streams())
    for name, given, message in (
        ("v", record.v[..., :-1], "v has width 5, must be 6"),
        ("rate", record.v, "rate has width 6, must be 1"),
        ("start", record.start[..., :-1], "start has width 41, must be 42"),
        ("gain", record.v, "the same for all tokens: give it the shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            replace(record, **{name: given})
    for name, given in (("size", 0), ("eps", 0.0)):
        with pytest.raises(ValueError, match="a minibatch has one token or more, and eps"):
            replace(record, **{name: given})
