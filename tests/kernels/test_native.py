"""The compiled kernels against the definition in float64: outputs, states, and the gradients of
every stream.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from cases import CASES, Case, Shape, cast, each, spread, turned
from extension import compiled, every_lesser_isa
from fastweights import kernels
from fastweights.kernels.native import build, decay_delta, library, memory, operators, windowed
from fastweights.methods import Recurrent, evaluate
from fastweights.ops.convolution import convolve
from fastweights.ops.normalization import rms_normalize
from fastweights.recurrence import DPLR, Decay, Delta, Recurrence, Selective
from fastweights.recurrence.timeline import FORGOTTEN
from tolerances import SAME, assert_close, error
from tolerances import TOLERANCE as TOLERANCES

TOLERANCE = 1e-5
SHAPES = [
    (1, 16, 64),
    (2, 1, 3),
    (63, 64, 16),
    (64, 3, 65),
    (65, 65, 64),
    (257, 16, 16),
    (65, 16, 1),
    (40, 1, 1),
]
GATES = ["gentle", "mixed", "steep", "resets", "empty"]
RULES = [(rule, "none", "gentle") for rule in ("decay", "delta")]
RULES += list(product(["decay", "delta"], ["scalar", "vector"], GATES))
RULES += [("decay", "tied", gate) for gate in GATES]
GENERAL = ["dplr", "dplr before", "dplr one key", "dplr one key before"]
RULES += [(rule, "none", "gentle") for rule in ("dplr", "dplr one key")]
RULES += list(product(GENERAL, ["scalar"], ["gentle", "resets"]))
RULES += list(product(GENERAL, ["vector"], ["gentle", "mixed", "steep", "resets"]))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def gates(kind: str, *shape: int) -> Tensor:
    """log α, float64"""
    x = torch.rand(*shape, dtype=torch.float64)
    if kind == "gentle":
        return -0.1 * x
    if kind == "mixed":
        return -6 * x**4
    if kind == "steep":
        return -10 - 10 * x
    if kind == "resets":
        return torch.where(x > 0.9, -torch.inf, -0.1 * x)
    return torch.full_like(x, -torch.inf)


def record(rule: str, decay: str, gate: str, b: int, t: int, h: int, k: int, v: int) -> Recurrence:
    q, key, value = (torch.randn(b, t, h, width, dtype=torch.float64) for width in (k, k, v))
    log_decay = None if decay == "none" else gates(gate, b, t, h, 1 if decay == "scalar" else k)
    if rule == "delta":
        beta = torch.rand(b, t, h, 1, dtype=torch.float64)
        return Delta(q, key / key.norm(dim=-1, keepdim=True), value, beta, log_decay)
    if rule in GENERAL:
        erase, remove = (0.8 * F.normalize(torch.randn_like(key), dim=-1) for _ in range(2))
        along = None if "one key" in rule else remove
        return DPLR(q, F.normalize(key, dim=-1), value, erase, along, log_decay, "before" in rule)
    if rule == "selective":
        delta, rate = gates(gate, b, t, h, 1), 3 * torch.rand(b, t, h, k, dtype=torch.float64)
        return Selective(q, key / k**0.5, value, delta, rate)
    return Decay(q, None if decay == "tied" else key / k**0.5, value, log_decay)


def results(recurrence: Recurrence, state: Tensor, **how: object) -> list[Tensor]:
    """o, the final state, and the gradients of all streams and the initial state."""
    leaves = {name: stream.detach().requires_grad_() for name, stream in recurrence.streams.items()}
    state = state.detach().requires_grad_()
    o, last = evaluate(replace(recurrence, **leaves), state, **how)
    return [o, last, *torch.autograd.grad(weighed(o, last), [*leaves.values(), state])]


def weighed(o: Tensor, last: Tensor) -> Tensor:
    """A fixed random functional of the output and the final state."""
    weights, exact = torch.Generator().manual_seed(1), torch.promote_types(o.dtype, torch.float64)
    drawn = (torch.randn(x.shape, generator=weights, dtype=exact) for x in (o, last))
    return sum((x * w).sum().real for x, w in zip((o, last), drawn, strict=True))


def halved(x: Tensor) -> Tensor:
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


def single(recurrence: Recurrence) -> Recurrence:
    """In float32 or complex64, strides kept."""
    return recurrence.map_streams(halved)


def assert_agrees(recurrence: Recurrence, kernel: str | None = None) -> None:
    """`recurrence`, float64, evaluated by the compiled kernels in float32."""
    b, _, h = recurrence.shape
    state = torch.randn(b, h, *recurrence.state_shapes[0][2:], dtype=recurrence.accumulator)
    kernel = kernel or kernels.select(single(recurrence)).name
    assert "compiled" in kernel
    wanted = results(recurrence, state, method=Recurrent())
    with kernels.only(kernel):
        got = results(single(recurrence), halved(state))
    for name, x, y in zip(
        ["o", "state", *recurrence.streams, "initial state"], got, wanted, strict=True
    ):
        assert x.isfinite().all(), name
        assert (x - y).abs().max() <= TOLERANCE * y.abs().max(), name


@pytest.mark.sampled
@compiled
@pytest.mark.parametrize(("rule", "decay", "gate"), RULES)
def test_equals_the_definition(rule: str, decay: str, gate: str) -> None:
    case = RULES.index((rule, decay, gate))
    for i in (0, 3):
        t, k, v = SHAPES[(case + i) % len(SHAPES)]
        assert_agrees(record(rule, decay, gate, b=1, t=t, h=3, k=k, v=v))


@compiled
@pytest.mark.parametrize(
    ("rule", "decay"), [("decay", "tied"), *product(["decay", "delta"], ["none", "vector"])]
)
@pytest.mark.parametrize("v", [64, 144, 20])
def test_a_token_of_many_heads(rule: str, decay: str, v: int) -> None:
    """States that are written past the caches, if they are whole vectors."""
    assert_agrees(record(rule, decay, "mixed", b=8, t=1, h=16, k=64, v=v))


@compiled
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_in_batches(shape: tuple[int, int, int]) -> None:
    t, k, v = shape
    assert_agrees(record("decay", "tied", "mixed", b=3, t=t, h=1, k=k, v=v), "decay (compiled)")


@compiled
@pytest.mark.parametrize(("k", "h"), [(1, 300), (16, 21), (5, 40), (64, 3)])
@pytest.mark.parametrize("decay", ["vector", "tied"])
@pytest.mark.parametrize("gate", ["mixed", "resets"])
def test_scans(decay: str, gate: str, k: int, h: int) -> None:
    assert_agrees(record("decay", decay, gate, b=2, t=41, h=h, k=k, v=1), "scan (compiled)")


@compiled
@pytest.mark.parametrize("k", [16, 5, 1])
@pytest.mark.parametrize("expanded", [False, True])
def test_scans_share_queries_keys_and_decays(k: int, expanded: bool) -> None:
    given = record("decay", "vector", "mixed", b=2, t=35, h=50, k=k, v=1)
    shared = {name: s[:, :, :1] for name, s in given.streams.items() if name != "v"}
    if expanded:
        shared = {name: s.expand(-1, -1, 50, -1) for name, s in shared.items()}
    assert_agrees(replace(given, **shared), "scan (compiled)")


@compiled
@pytest.mark.parametrize(
    ("t", "h", "k"), [(41, 21, 16), (16, 40, 5), (1, 3, 64), (1, 17, 3), (33, 300, 2), (17, 1, 128)]
)
@pytest.mark.parametrize("gate", ["mixed", "resets", "empty"])
@pytest.mark.parametrize("shared", [False, True])
def test_selective_scans(gate: str, t: int, h: int, k: int, shared: bool) -> None:
    """With queries and keys of all heads and rates of all tokens, as Mamba's, and of each."""
    given = record("selective", "vector", gate, b=2, t=t, h=h, k=k, v=1)
    if shared:
        q, key, rate = given.q[:, :, :1], given.k[:, :, :1], given.rate[:1, :1]
        given = replace(given, q=q, k=key, rate=rate)
    assert_agrees(given, "selective scan (compiled)")


@compiled
def test_what_a_selective_scan_refuses() -> None:
    for sizes in ({"k": 1, "v": 1}, {"k": 3, "v": 2}, {"k": 129, "v": 1}):
        given = single(record("selective", "vector", "mixed", b=1, t=3, h=2, **sizes))
        with pytest.raises(LookupError), kernels.only("selective scan (compiled)"):
            evaluate(given)


@compiled
def test_a_selective_scan_in_a_compiled_graph() -> None:
    given = single(record("selective", "vector", "resets", b=2, t=20, h=17, k=3, v=1))
    given = replace(given, q=given.q[:, :, :1], rate=given.rate[:1, :1])
    streams = decay_delta.Streams.of(decay_delta.SCAN, given)
    streams = streams.expand_for_scan(2, 20, 17, sharing=True)
    leaves = [None if s is None else s.detach().requires_grad_() for s in streams]
    start = torch.randn(given.state_shapes[0], requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(operators.native, (True, False, start, *leaves), test_utils=checks)


def turning(given: Recurrence, *real: str) -> Decay:
    """The record on complex numbers, with an angle to its decays; the streams `real` stay as they
    are.
    """
    assert isinstance(given, Decay)
    wide = {
        n: torch.complex(s, 3 * torch.randn_like(s))
        for n, s in given.streams.items()
        if n not in real
    }
    return replace(given, **wide)


@compiled
@pytest.mark.parametrize(("k", "h"), [(1, 300), (1, 16), (16, 21), (5, 40), (32, 16)])
@pytest.mark.parametrize("decay", ["vector", "tied"])
@pytest.mark.parametrize("gate", ["gentle", "resets"])
def test_complex_scans(decay: str, gate: str, k: int, h: int) -> None:
    assert_agrees(
        turning(record("decay", decay, gate, b=2, t=41, h=h, k=k, v=1), "q"), "scan (compiled)"
    )


@compiled
@pytest.mark.parametrize(("k", "v"), [(1, 3), (6, 2), (150, 2), (150, 1)])
@pytest.mark.parametrize("decay", ["vector", "tied"])
def test_complex_heads_of_several_values_and_wide_keys(decay: str, k: int, v: int) -> None:
    """H3's: a system per product of a key with a value."""
    given = turning(record("decay", decay, "mixed", b=2, t=20, h=3, k=k, v=v), "v")
    assert_agrees(given, "scan (compiled)")
    assert_agrees(replace(given, log_decay=given.log_decay[:1, :1]), "scan (compiled)")
    assert kernels.select(single(given)[:1]).name == "step (torch)"


@compiled
@pytest.mark.parametrize("k", [1, 16])
def test_systems_constant_in_time(k: int) -> None:
    """S4D and the LRU: real values, and all else without batch and time."""
    given = turning(record("decay", "vector", "gentle", b=2, t=50, h=40, k=k, v=1), "v")
    constant = {n: s[:1, :1] for n, s in given.streams.items() if n != "v"}
    assert_agrees(replace(given, **constant), "scan (compiled)")


@compiled
def test_angles_however_large_and_conjugates() -> None:
    given = turning(record("decay", "vector", "gentle", b=1, t=9, h=20, k=3, v=1))
    far = torch.complex(
        given.log_decay.real,
        torch.randn_like(given.log_decay.real).mul(1e6).round().float().double(),
    )
    assert_agrees(replace(given, log_decay=far, q=given.q.conj(), v=given.v.conj()))


@compiled
@pytest.mark.parametrize(
    ("rule", "number", "k"),
    [*product(["decay"], ["real", "complex"], [1, 5]), ("selective", "real", 5)],
)
def test_only_wanted_gradients_are_found(rule: str, number: str, k: int) -> None:
    given = record(rule, "vector", "mixed", b=1, t=20, h=6, k=k, v=1)
    given = single(turning(given) if number == "complex" else given)
    wanted = results(given, halved(given.initial_state()))[2:]
    for (name, stream), gradient in zip(given.streams.items(), wanted, strict=False):
        leaf = stream.detach().requires_grad_()
        loss = weighed(*evaluate(replace(given, **{name: leaf})))
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], gradient), name


@compiled
@pytest.mark.parametrize(
    ("rule", "k", "v"),
    [
        ("decay", 5, 6),
        ("decay", 5, 1),
        ("decay", 1, 1),
        ("delta", 5, 6),
        ("dplr", 5, 6),
        ("selective", 5, 1),
    ],
)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_streams_broadcast(rule: str, k: int, v: int, axis: int) -> None:
    given = record(rule, "vector", "mixed", b=2, t=35, h=3, k=k, v=v)
    for name, stream in given.streams.items():
        assert_agrees(replace(given, **{name: stream.narrow(axis, 0, 1)}))
        assert_agrees(replace(given, **{name: stream.narrow(axis, 0, 1).expand_as(stream)}))


@compiled
@pytest.mark.parametrize(
    ("rule", "v"), [*product(["decay", "delta", "dplr"], [6, 1]), ("selective", 1)]
)
def test_any_strides(rule: str, v: int) -> None:
    given = record(rule, "vector", "mixed", b=2, t=35, h=3, k=5, v=v)
    assert_agrees(given.map_streams(turned))
    assert_agrees(given.map_streams(spread))


@compiled
def test_half_precision_streams_are_converted() -> None:
    given = record("delta", "scalar", "gentle", b=1, t=20, h=2, k=8, v=8)
    half = {name: s.bfloat16() for name, s in given.streams.items() if name != "log_decay"}
    wanted, _ = evaluate(
        replace(given, **{name: s.double() for name, s in half.items()}), method=Recurrent()
    )
    o, state = evaluate(replace(single(given), **half))
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o, wanted.to(torch.bfloat16))


@compiled
@pytest.mark.parametrize(
    ("rule", "h", "k", "v"),
    [
        ("decay", 1, 64, 130),
        ("decay", 5, 32, 32),
        ("delta", 1, 64, 130),
        ("selective", 300, 16, 1),
    ],
)
def test_threads_share_the_work(rule: str, h: int, k: int, v: int) -> None:
    given = single(record(rule, "vector", "mixed", b=1, t=100, h=h, k=k, v=v))
    alone, together = [], []
    for threads, found in ((1, alone), (2, together)):
        torch.set_num_threads(threads)
        found += results(given, torch.zeros(1, h, k, v))
    for x, y in zip(alone, together, strict=True):
        assert torch.equal(x, y)


@compiled
def test_python_threads_and_forked_processes_compute_too() -> None:
    torch.set_num_threads(2)
    given = single(record("decay", "scalar", "gentle", b=1, t=200, h=4, k=32, v=32))
    wanted, _ = evaluate(given)
    outputs: list[Tensor] = []
    workers = [
        threading.Thread(target=lambda: outputs.append(evaluate(given)[0])) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(outputs) == 8
    assert all(torch.equal(o, wanted) for o in outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(evaluate(given)[0], wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


@compiled
@every_lesser_isa
@pytest.mark.parametrize(
    ("rule", "h", "k", "v"),
    [
        ("decay", 3, 20, 20),
        ("delta", 3, 20, 20),
        ("dplr before", 3, 20, 20),
        ("decay", 3, 20, 1),
        ("decay", 21, 16, 1),
        ("decay", 40, 1, 1),
        ("selective", 21, 16, 1),
        ("selective", 5, 20, 1),
    ],
)
def test_lesser_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, isa: str, rule: str, h: int, k: int, v: int
) -> None:
    for name in ("MATRIX", "SCAN", "COMPLEX"):
        code = getattr(decay_delta, name)
        monkeypatch.setattr(
            decay_delta,
            name,
            code._replace(forward=f"{code.forward}_{isa}", backward=f"{code.backward}_{isa}"),
        )
    for gate, t in (("gentle", 40), ("resets", 40), ("mixed", 1)):
        given = record(rule, "vector", gate, b=1, t=t, h=h, k=k, v=v)
        assert_agrees(given)
        if isinstance(given, Decay) and v == 1:
            assert_agrees(turning(given))


@compiled
@pytest.mark.parametrize("heads", [1, 300])
def test_exponentials(heads: int) -> None:
    """0 for −inf and for what float32 cannot hold; NaN stays NaN."""
    log_decay = torch.tensor(
        [0.0, -1e-9, -1.0, -86.0, -100.0, -1e30, -torch.inf, torch.nan]
    ).reshape(8, 1, 1, 1)
    ones = torch.ones(1, 1, heads, 1)
    _, state = evaluate(Decay(ones, 0 * ones, ones, log_decay), torch.ones(8, heads, 1, 1))
    wanted = log_decay.double().exp().expand(8, heads, 1, 1)
    torch.testing.assert_close(state.double(), wanted, rtol=3e-7, atol=1e-37, equal_nan=True)


@compiled
@pytest.mark.parametrize("documents", [None, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("t", "d", "taps"), [(37, 100, 4), (2, 16, 4), (50, 300, 64), (5, 5, 2), (20, 33, 1)]
)
def test_short_convolutions(t: int, d: int, taps: int, documents: torch.dtype | None) -> None:
    """Against y_t = Σ_j w_j x_{t-n+j} in float64, tap by tap; channels apart in memory, as after a
    split.
    """
    tail, weight = torch.randn(2, taps - 1, d), torch.randn(taps, d)
    x = torch.randn(2, t, 2 * d)[..., :d]
    ids = torch.randint(2, (2, taps - 1 + t)).cumsum(1).to(documents)
    upstream, found = torch.randn(2, t, d), []
    for dtype in (torch.float32, torch.float64):
        leaves = [s.to(dtype).requires_grad_() for s in (tail, x, weight)]
        y, _ = convolve(*leaves, ids if documents else None)
        found.append([y, *torch.autograd.grad(y, leaves, upstream.to(dtype))])
    seen = torch.cat([tail, x], 1).double()
    same = (
        ids[:, None] == ids[:, taps - 1 :, None]
        if documents
        else torch.ones(2, t, taps - 1 + t, dtype=torch.bool)
    )
    for i in range(t):
        terms = seen[:, i : i + taps] * weight.double() * same[:, i, i : i + taps, None]
        torch.testing.assert_close(found[1][0][:, i], terms.sum(1))
    for got, wanted in zip(*found, strict=True):
        assert wanted.numel() == 0 or (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


NORMS = [
    ((3, 5, 100), True),
    ((2, 16), False),
    ((130, 33), True),
    ((1, 1, 4, 7), True),
    ((70, 64), False),
]


def normed(x: Tensor, weight: Tensor | None, upstream: Tensor) -> list[Tensor]:
    """y and the gradients."""
    leaves = [s.detach().requires_grad_() for s in (x, weight) if s is not None]
    y = rms_normalize(leaves[0], None if weight is None else leaves[1], 1e-2)
    return [y, *torch.autograd.grad(y, leaves, upstream)]


def assert_norms(shape: tuple[int, ...], weighted: bool) -> None:
    """Against x (mean x² + ε)^(-½) w in float64; vectors far apart in memory."""
    x, upstream = (torch.randn(*shape, 2)[..., 0] for _ in range(2))
    weight = torch.randn(shape[-1]) if weighted else None
    exact = [None if s is None else s.double().requires_grad_() for s in (x, weight)]
    y = (
        exact[0]
        * (exact[0].square().mean(-1, keepdim=True) + 1e-2).rsqrt()
        * (1 if weight is None else exact[1])
    )
    wanted = [y, *torch.autograd.grad(y, [s for s in exact if s is not None], upstream.double())]
    for got, want in zip(normed(x, weight, upstream), wanted, strict=True):
        assert error(got, want) <= 1e-6


@compiled
@pytest.mark.parametrize(("shape", "weighted"), NORMS)
def test_norms(shape: tuple[int, ...], weighted: bool) -> None:
    assert_norms(shape, weighted)


@compiled
@every_lesser_isa
def test_norms_by_lesser_instruction_sets(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    asked, call = [], library.call
    monkeypatch.setattr(
        library, "call", lambda name, given: asked.append(name) or call(f"{name}_{isa}", given)
    )
    for shape, weighted in NORMS:
        assert_norms(shape, weighted)
    assert set(asked) == {"fw_norm", "fw_norm_back"}


@compiled
def test_threads_share_the_rows_of_a_norm() -> None:
    torch.set_num_threads(2)
    assert_norms((4, 300, 64), True)


def test_norms_in_other_precisions_and_transforms_are_those_of_torch() -> None:
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    for given in (
        (x.half(), weight.half()),
        (x.double(), weight.double()),
        (x[:0], weight),
    ):
        assert torch.equal(rms_normalize(*given, 1e-5), F.rms_norm(given[0], (8,), given[1], 1e-5))
    mapped = torch.func.vmap(
        torch.func.grad(lambda row, w: rms_normalize(row, w, 1e-5).square().sum()), (0, None)
    )
    assert_close(mapped(x, weight), normed_gradient(x, weight), "gradient")


def normed_gradient(x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(rms_normalize(x, weight, 1e-5).square().sum(), x)[0]


def test_short_convolutions_are_mapped() -> None:
    tail, x, taps = torch.randn(4, 2, 3, 5), torch.randn(4, 2, 7, 5), torch.randn(4, 5)
    mapped = torch.func.vmap(lambda *given: convolve(*given, taps, None)[0])(tail, x)
    assert_close(
        mapped,
        torch.stack([convolve(*given, taps, None)[0] for given in zip(tail, x, strict=True)]),
        "y",
    )


def test_layers_of_tensors_without_numbers_have_shapes() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(2, 7, 5), torch.empty(5)
        assert rms_normalize(x, weight, 1e-5).shape == (2, 7, 5)
        assert convolve(torch.empty(2, 3, 5), x, torch.empty(4, 5), None)[0].shape == (2, 7, 5)


def test_norms_have_gradients_of_gradients() -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        x, weight = (
            torch.randn(6, 20).to(dtype).requires_grad_(),
            torch.randn(20).to(dtype).requires_grad_(),
        )
        slope = torch.autograd.grad(
            rms_normalize(x, weight, 1e-5).pow(3).sum(), x, create_graph=True
        )[0]
        found.append(torch.autograd.grad(slope.square().sum(), (x, weight)))
    for got, want in zip(*found, strict=True):
        assert error(got, want) <= SAME


def test_large_results_are_written_to_the_pages_of_dropped_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "PAGES", memory.PagePool())
    first, second = memory.empty(1 << 20), memory.empty(1 << 20)
    place, part = first.data_ptr(), first[5:]
    del first
    third = memory.empty(1 << 20)
    assert len({place, second.data_ptr(), third.data_ptr()}) == 3
    del part
    assert memory.empty(1 << 20).data_ptr() == place


def test_no_more_pages_are_kept_than_were_in_use_at_once() -> None:
    pages, size = memory.PagePool(), 1 << 22
    first, second = pages.lend(size), pages.lend(size)
    del first, second
    assert (pages.in_use, pages.idle) == (0, 2 * size)
    larger = pages.lend(size + 4096)
    assert pages.in_use + pages.idle <= 2 * size
    again = pages.lend(size)
    assert (pages.in_use, pages.idle) == (2 * size + 4096, 0)
    del larger, again


def test_pages_that_are_no_longer_needed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PERIOD", 4)
    pages = memory.PagePool()
    several = [pages.lend(1 << 22) for _ in range(3)]
    several.clear()
    for _ in range(8):
        pages.lend(1 << 20)
    assert pages.idle <= 1 << 20


@compiled
def test_the_pool_of_pages_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers; idle pages, and those given back from then on, are the system's."""
    pages = memory.PagePool()
    monkeypatch.setattr(memory, "PAGES", pages)
    given = single(record("decay", "scalar", "gentle", b=1, t=600, h=8, k=16, v=128))
    state = halved(given.initial_state())
    wanted = results(given, state)
    assert pages.in_use > 0
    held = memory.empty(1 << 20)
    with kernels.pooling(False):
        assert not kernels.numerics()["page_pool"]
        assert pages.idle == 0
        lent = pages.in_use
        got = results(given, state)
        assert (pages.in_use, pages.idle) == (lent, 0)
        del held
        assert pages.in_use < lent
        assert pages.idle == 0
    assert kernels.numerics()["page_pool"]
    assert all(map(torch.equal, got, wanted))
    del got, wanted
    assert pages.idle > 0


WINDOWS = [case for case in CASES if case.name.startswith("windowed")]
STATES: dict[str, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "full": lambda state: state,
    "growing": lambda state: (*(s[:, :, :1] for s in state[:3]), state[3], state[4][:, -1:]),
    "forgotten": lambda state: (*state[:4], state[4].masked_fill(state[4] > 2, FORGOTTEN)),
}


def token(case: Case, h: int, k: int, v: int) -> tuple[Recurrence, tuple[Tensor, ...]]:
    shape = Shape(b=2, t=1, h=h, k=k, v=v)
    state = case.start(shape)
    assert isinstance(state, tuple)
    return case.rule(**case.streams(shape)), state


def assert_steps(
    recurrence: Recurrence, state: tuple[Tensor, ...], dtype: torch.dtype = torch.float32
) -> None:
    """`windowed.c` on streams and caches in `dtype`, against the definition on the same numbers in
    float64.
    """
    narrow = recurrence.map_streams(lambda s: s.to(dtype))
    *ring, memory, age = state
    before = (*(s.to(dtype) for s in ring), memory.float(), age)
    exact = narrow.map_streams(Tensor.double)
    wanted, after = evaluate(
        exact, tuple(s.double() if s.is_floating_point() else s for s in before), Recurrent()
    )
    with kernels.only(windowed.NATIVE_WINDOW.name):
        got, found = evaluate(narrow, before)
    for x, y in zip((got, *found), (wanted, *after), strict=True):
        assert error(x, y) <= (TOLERANCES[x.dtype] if x.dtype == torch.bfloat16 else SAME)
    assert [s.dtype for s in found] == [s.dtype for s in before]


@compiled
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_one_token_of_a_window(case: Case, state: str) -> None:
    for h, k, v in ((2, 3, 5), (4, 16, 70), (1, 33, 32)):
        recurrence, full = token(case, h, k, v)
        assert_steps(recurrence, STATES[state](full))


@compiled
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_one_token_of_any_strides_and_dtype(case: Case) -> None:
    recurrence, state = token(case, 2, 20, 9)
    assert_steps(recurrence.map_streams(turned), state)
    assert_steps(recurrence.map_streams(spread), state)
    shared = {"q": recurrence.q[:1], "v": recurrence.v[:, :, :1], "mix": recurrence.mix[:1, :, :1]}
    assert_steps(replace(recurrence, **shared), state)
    assert_steps(recurrence, state, torch.bfloat16)


@compiled
@every_lesser_isa
def test_one_token_by_lesser_instruction_sets(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setattr(windowed, "ONE_TOKEN", f"{windowed.ONE_TOKEN}_{isa}")
    for case in WINDOWS:
        assert_steps(*token(case, 4, 20, 37))


@compiled
def test_threads_share_the_heads_of_a_window() -> None:
    recurrence, state = token(WINDOWS[0], 16, 64, 130)
    torch.set_num_threads(2)
    assert_steps(recurrence, state)


@compiled
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_token_of_a_window_has_gradients(case: Case) -> None:
    recurrence, state = token(case, 2, 5, 6)
    found = []
    for given in (recurrence, single(recurrence)):
        leaves = {n: s.detach().requires_grad_() for n, s in given.streams.items()}
        o, after = evaluate(
            replace(given, **leaves), each(state, lambda s, like=given.q: cast(s, like.dtype))
        )
        found.append(
            torch.autograd.grad(
                o.sum() + after[3].square().sum(), [*leaves.values()], allow_unused=True
            )
        )
    for exact, near in zip(*found, strict=True):
        assert (exact is None) == (near is None)
        assert exact is None or (near - exact).abs().max() <= TOLERANCE * max(exact.abs().max(), 1)


@compiled
def test_a_token_that_may_be_padding_is_not_for_c() -> None:
    recurrence, _ = token(WINDOWS[0], 2, 3, 5)
    for given in (
        recurrence.keep(torch.tensor([[True], [False]])),
        recurrence.segments(torch.zeros(2, 1).long()),
    ):
        assert "its token may be padding or begin a document" in kernels.explain(single(given))


@compiled
def test_records_without_heads() -> None:
    for rule in ("decay", "delta"):
        o, state = evaluate(single(record(rule, "vector", "gentle", b=0, t=3, h=2, k=4, v=4)))
        assert (o.shape, state.shape) == ((0, 3, 2, 4), (0, 2, 4, 4))


@compiled
@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float64, "float64, not torch.float32 or"),
        (torch.complex128, "complex128, not torch.float32 or"),
    ],
)
def test_refuses_what_c_does_not_read(dtype: torch.dtype, reason: str) -> None:
    given = record("decay", "vector", "gentle", b=1, t=3, h=2, k=4, v=1)
    given = replace(
        given,
        q=given.q.to(dtype),
        v=given.v.float(),
        k=given.k.float(),
        log_decay=given.log_decay.float(),
    )
    assert reason in kernels.explain(given)
    assert "compiled" not in kernels.select(given).name


def test_torch_takes_over_where_the_extension_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    for rule in ("decay", "delta"):
        for t in (1, 70):
            given = single(record(rule, "vector", "mixed", b=1, t=t, h=2, k=4, v=4))
            assert (
                f"{rule} (compiled): refused: the compiled extension is missing"
                in kernels.explain(given)
            )
            assert "torch" in kernels.select(given).name
            o, _ = evaluate(given)
            torch.testing.assert_close(
                o, evaluate(given, method=Recurrent())[0], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(
    ("cc", "message"),
    [
        ("false", "false failed on"),
        ("/nonexistent/cc -O2", "CC=/nonexistent/cc -O2: there is no command /nonexistent/cc"),
        ("", "no C compiler found"),
    ],
)
def test_building_without_a_working_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch, cc: str, message: str
) -> None:
    monkeypatch.setenv("CC", cc)
    if not cc:
        monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=message):
        build.build()
