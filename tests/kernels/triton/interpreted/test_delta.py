"""`Delta` in chunks, forward and backward, beside its definition; the operator also with erasing
keys of their own, and `DPLR` by it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels import CHUNKED_DELTA
from fastweights.kernels.triton import chunks as host
from fastweights.kernels.triton.chips import CHIPS, pretend
from fastweights.kernels.triton.chunks import WIDEST
from fastweights.kernels.triton.delta import DELTA, TRITON_DELTA, TRITON_DPLR
from fastweights.kernels.triton.operator import NoSettings
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import DPLR, Delta
from poison import poisoned_memory
from triton_checks import TOLERANCE, Streams, check, relative

pytestmark = pytest.mark.sampled

PAIRS = [
    ("none", torch.float32),
    ("scalar", torch.bfloat16),
    ("vector", torch.float32),
    ("vector", torch.float16),
]


def build(streams: Streams) -> Delta:
    return Delta(**streams)  # type: ignore[arg-type]


def make(
    t: int = 70, *, k: int = 16, v: int = 16, b: int = 1, h: int = 1, decay: str = "vector"
) -> Streams:
    """Random streams in float64, with keys of length 1 and β in [0, 2]."""
    torch.manual_seed(t)
    width = {"none": 0, "scalar": 1, "vector": k}[decay]
    return {
        "q": torch.randn(b, t, h, k, dtype=torch.float64),
        "k": F.normalize(torch.randn(b, t, h, k, dtype=torch.float64), dim=-1),
        "v": torch.randn(b, t, h, v, dtype=torch.float64),
        "beta": 2 * torch.rand(b, t, h, 1, dtype=torch.float64),
        "log_decay": -0.4 * torch.rand(b, t, h, width, dtype=torch.float64) if width else None,
    }


def stream_of(streams: Streams, name: str) -> Tensor:
    stream = streams[name]
    assert stream is not None
    return stream


@pytest.mark.parametrize(("decay", "dtype"), PAIRS)
def test_every_decay_agrees_in_every_dtype(decay: str, dtype: torch.dtype) -> None:
    check(TRITON_DELTA, build, make(decay=decay), dtype)


@pytest.mark.parametrize(
    ("tokens", "decay"), [(1, "vector"), (64, "scalar"), (65, "vector"), (150, "none")]
)
def test_any_length_is_cut_into_chunks(tokens: int, decay: str) -> None:
    check(TRITON_DELTA, build, make(tokens, decay=decay))


@pytest.mark.parametrize(
    ("k", "v", "decay"), [(20, 40, "scalar"), (40, 20, "vector"), (72, 24, "none")]
)
def test_widths_need_not_fill_tiles(k: int, v: int, decay: str) -> None:
    check(TRITON_DELTA, build, make(40, k=k, v=v, decay=decay))


@pytest.mark.parametrize(
    ("decay", "dtype"), [("scalar", torch.float32), ("vector", torch.bfloat16)]
)
def test_resets_are_exact(decay: str, dtype: torch.dtype) -> None:
    streams = make(decay=decay)
    stream_of(streams, "log_decay")[:, [0, 20, 24, 63]] = -torch.inf
    check(TRITON_DELTA, build, streams, dtype)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_steep_decays_are_exact(decay: str) -> None:
    streams = make(decay=decay)
    # not the first, after which nothing would be left of the initial state
    stream_of(streams, "log_decay")[:, 5:][:, torch.rand(65) < 0.3] *= 5000
    check(TRITON_DELTA, build, streams)


def test_from_the_empty_state() -> None:
    check(TRITON_DELTA, build, make(40, decay="scalar"), state=False)


def test_streams_may_be_shared_and_lie_in_any_layout() -> None:
    streams = make(40, b=2, h=2, decay="scalar")
    for name, axis in {"q": 0, "k": 2, "log_decay": 0, "beta": 2}.items():
        streams[name] = stream_of(streams, name).narrow(axis, 0, 1)

    def lay_out(streams: Streams) -> Delta:
        v = stream_of(streams, "v")
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
        k = stream_of(streams, "k")
        return build({**streams, "v": v, "k": torch.cat([k, k + 1], -1)[..., : k.shape[-1]]})

    check(TRITON_DELTA, lay_out, streams)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_time_is_walked_in_segments(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHORTEST_SEGMENT", 1)
    with pretend(CHIPS[90]._replace(multiprocessors=1000)):
        check(TRITON_DELTA, build, make(133, k=24, decay=decay))


def test_tokens_that_write_nothing_have_no_part() -> None:
    streams = make(40, decay="none")
    stream_of(streams, "beta")[:, 10:20] = 0
    check(TRITON_DELTA, build, streams)


@pytest.mark.parametrize(
    ("alike", "length", "beta"), [(False, 1.0, 2.0), (True, 1.0, 1.9), (False, 1.5, 1.0)]
)
def test_ill_conditioned_systems_are_solved_as_well_as_by_torch(
    alike: bool, length: float, beta: float
) -> None:
    """Keys that resemble each other or are long, with strong writing: what is written is the small
    difference of large numbers.
    """
    streams = {n: None if s is None else s.float() for n, s in make(150, decay="none").items()}
    k = stream_of(streams, "k")
    streams["k"] = length * F.normalize(0.2 * k + 0.25 if alike else k, dim=-1)
    streams["beta"] = torch.full_like(stream_of(streams, "beta"), beta)
    state = torch.zeros(1, 1, 16, 16)
    exact = {n: None if s is None else s.double() for n, s in streams.items()}
    wanted, _ = evaluate(build(exact), state.double(), Recurrent())
    found, _ = TRITON_DELTA.compute(build(streams), state)
    of_torch, _ = CHUNKED_DELTA.compute(build(streams), state)
    assert relative(found, wanted) <= 4 * relative(of_torch, wanted) + 1e-7


def erase_and_write(
    state: Tensor, q: Tensor, e: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """(o, the last state) token by token:
    S_t = (I - β_t k_tᵀ e_t) diag(α_t) S_{t-1} + β_t k_tᵀ v_t.
    """
    outputs = []
    for t in range(q.shape[1]):
        q_t, e_t, k_t, v_t, beta_t = (x[:, t].unsqueeze(-2) for x in (q, e, k, v, beta))
        state = log_decay[:, t].exp().unsqueeze(-1) * state
        state = state + k_t.mT * beta_t * (v_t - e_t @ state)
        outputs.append((q_t @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize(("decay", "dtype"), PAIRS[1:])
def test_other_keys_may_erase_than_write(decay: str, dtype: torch.dtype) -> None:
    streams = make(decay=decay)
    e = F.normalize(torch.randn_like(stream_of(streams, "q")), dim=-1)
    given = [stream_of(streams, "q"), e, *(stream_of(streams, n) for n in ("k", "v", "beta"))]
    given = [torch.randn(1, 1, 16, 16), *(x.to(dtype) for x in given)]
    given.append(stream_of(streams, "log_decay").float())
    exact = [x.double().requires_grad_() for x in given]
    given = [x.requires_grad_() for x in given]
    with poisoned_memory():
        found = DELTA(NoSettings(), *given)
        weights = [torch.randn_like(x.detach(), dtype=torch.float32) for x in found]
        sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    wanted = erase_and_write(*exact)
    sum((x * w.double()).sum() for x, w in zip(wanted, weights, strict=True)).backward()
    errors = [relative(a, b) for a, b in zip(found, wanted, strict=True)]
    errors += [relative(a.grad, b.grad) for a, b in zip(given, exact, strict=True)]
    assert max(errors) <= TOLERANCE[dtype], errors


def untie(streams: Streams) -> DPLR:
    """`DPLR` whose k writes and erases."""
    q, w, v, a = (stream_of(streams, name) for name in ("q", "k", "v", "a"))
    return DPLR(q, w, v, a, None, streams["log_decay"])


def make_untied(t: int = 70, decay: str = "vector") -> Streams:
    streams = make(t, decay=decay)
    streams["a"] = F.normalize(torch.randn_like(stream_of(streams, "k")), dim=-1)
    del streams["beta"]
    return streams


@pytest.mark.parametrize(("decay", "dtype"), PAIRS)
def test_the_general_rule_with_one_key_to_write_and_erase(decay: str, dtype: torch.dtype) -> None:
    check(TRITON_DPLR, untie, make_untied(decay=decay), dtype)


def test_keys_further_apart_are_left_to_others() -> None:
    rule = untie({n: None if s is None else s.float() for n, s in make_untied(4).items()})
    assert TRITON_DPLR.refuses(rule) is None
    assert "of its own (b)" in (TRITON_DPLR.refuses(replace(rule, b=rule.w)) or "")
    assert "before the state decays" in (TRITON_DPLR.refuses(replace(rule, before=True)) or "")
    assert TRITON_DPLR.refuses(replace(rule, log_decay=None, before=True)) is None


@pytest.mark.slow
def test_gradients_repeat_bit_by_bit() -> None:
    def gradients() -> list[Tensor]:
        streams = make(v=72, decay="scalar")
        given = {n: s.float().requires_grad_() for n, s in streams.items() if s is not None}
        o, last = TRITON_DELTA.compute(build(dict(given)), torch.zeros(1, 1, 16, 72))
        (o.square().sum() + last.square().sum()).backward()
        return [s.grad for s in given.values() if s.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_what_the_kernels_do_not_take_is_said() -> None:
    def refusal(**changes: Tensor) -> str | None:
        single = {n: None if s is None else s.float() for n, s in make(4, decay="none").items()}
        return TRITON_DELTA.refuses(build({**single, **changes}))

    q = torch.randn(1, 4, 1, 16)
    assert refusal() is None
    assert "torch.float64" in (refusal(q=q.double()) or "")
    assert "wider" in (refusal(v=q[..., :1].expand(1, 4, 1, WIDEST + 1)) or "")
