"""One token of softmax attention in C, against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import kernels
from fastweights.kernels.attention import SPAN, attend_to_cache
from fastweights.kernels.growing import append
from fastweights.kernels.native import library
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import Softmax

pytestmark = pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")

NATIVE = "attention, one token (compiled)"


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return scale * torch.randn(*shape, generator=generator)


def wanted(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q.double(), keys.double(), values.double(), seen)


@pytest.mark.parametrize("s", [1, 7, 128, 129, 1000])
@pytest.mark.parametrize(("g", "r", "k", "v"), [(1, 1, 1, 1), (3, 3, 64, 64), (2, 4, 20, 131)])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_softmax(s: int, g: int, r: int, k: int, v: int, *, masked: bool) -> None:
    q, keys, values = drawn(2, g, r, k, scale=4.0), drawn(2, g, s, k), drawn(2, g, s, v)
    seen = None
    if masked:  # also whole spans, at the ends and in between
        seen = drawn(2, 1, 1, s) > 0
        seen[0, ..., : s // 2], seen[..., -1] = False, True
    found = attend_to_cache(q, keys, values, seen)
    torch.testing.assert_close(found, wanted(q, keys, values, seen).float(), rtol=2e-5, atol=2e-6)


def test_a_cache_with_room_behind_it() -> None:
    keys, values = (append(drawn(2, 3, 5, 16), drawn(2, 3, 1, 16)) for _ in range(2))
    assert not keys.is_contiguous()
    q = drawn(2, 3, 2, 16)
    torch.testing.assert_close(
        attend_to_cache(q, keys, values, None), wanted(q, keys, values, None).float()
    )


def test_scores_of_any_size_and_what_is_not_finite() -> None:
    q, keys, values = drawn(1, 1, 2, 8, scale=1e3), drawn(1, 1, 300, 8), drawn(1, 1, 300, 8)
    torch.testing.assert_close(
        attend_to_cache(q, keys, values, None), wanted(q, keys, values, None).float()
    )
    keys[0, 0, 77, 3] = torch.nan
    assert attend_to_cache(q, keys, values, None).isnan().all()


def test_threads_do_not_change_the_bits() -> None:
    s = 40 * library.read_constant(SPAN)
    q, keys, values = drawn(1, 2, 3, 32), drawn(1, 2, s, 32), drawn(1, 2, s, 32)
    found, threads = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(attend_to_cache(q, keys, values, None))
    torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("window", [None, 7])
def test_tokens_of_a_record_are_read_by_it(window: int | None) -> None:
    q, k, v = drawn(2, 150, 4, 6), drawn(2, 150, 2, 6), drawn(2, 150, 2, 5)
    softmax = Softmax(q, k, v, window)
    with torch.inference_mode():
        expected, end = evaluate(softmax, None, Recurrent())
        state = softmax.initial_state()
        for i in range(150):
            assert f"{NATIVE}: taken" in kernels.explain(softmax[i : i + 1])
            o, state = evaluate(softmax[i : i + 1], state)
            torch.testing.assert_close(o, expected[:, i : i + 1], rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, state, end))
