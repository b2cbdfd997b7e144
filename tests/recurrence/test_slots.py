"""Memories of slots: what is a case of them, and which kernels evaluate them."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from cases import CASES, Shape, normal
from fastweights.kernels import explain, select
from fastweights.methods import evaluate
from fastweights.recurrence import ShapeError, Slots
from oracles import slots
from tolerances import array, assert_close


def drawn(t: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = Generator().manual_seed(0)
    q, k, v, logits = (normal(2, t, 2, width, generator=g) for width in (3, 3, 5, 4))
    return q, k, v, logits


def test_attention_with_bounded_memory_is_a_case_of_it() -> None:
    q, k, v, logits = drawn()
    sums = logits.logcumsumexp(1)
    before = torch.cat([torch.full_like(sums[:, :1], -torch.inf), sums[:, :-1]], 1)
    record = Slots(q, k, v, (logits - sums).exp(), before - sums)
    assert_close(evaluate(record)[0], slots.abc(*map(array, (q, k, v, logits))), "o")


def test_as_many_slots_as_tokens_are_softmax_attention() -> None:
    q, k, v, _ = drawn(t=6)
    own = torch.eye(6, dtype=torch.float64)[None, :, None].expand(2, 6, 2, 6)
    o, (keys, values) = evaluate(Slots(q, k, v, own))
    assert_close(keys, k.transpose(1, 2), "keys")
    assert_close(values, v.transpose(1, 2), "values")
    want = torch.einsum("bhs,bshv->bhv", torch.einsum("bhk,bshk->bhs", q[:, -1], k).softmax(-1), v)
    assert_close(o[:, -1], want, "the last token's output")


def test_both_recurrences_go_by_the_kernels_of_decays() -> None:
    case = next(case for case in CASES if case.name == "slots-vector")
    record = case.rule(**case.streams(Shape(t=8)))
    assert select(record).name == "slots: the kernel of decays, twice"
    assert "slots: the kernel of decays, twice" in str(explain(record))


@pytest.mark.usefixtures("unchecked")
def test_streams_that_do_not_fit() -> None:
    q, k, v, logits = drawn()
    with pytest.raises(ShapeError, match="log_decay has width 3, must be 1 or 4"):
        Slots(q, k, v, logits, logits[..., :3])
    with pytest.raises(ShapeError, match="k has width 2, must be 3"):
        Slots(q, k[..., :2], v, logits)
