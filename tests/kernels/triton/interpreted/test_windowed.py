"""`WindowedLinear` in Triton beside its definition in float64, token by token."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastweights.features import Elu, Exponential, Hedgehog, LearnedFeatures, Relu
from fastweights.kernels import Kernel, explain
from fastweights.kernels.triton import windowed
from fastweights.kernels.triton.windowed import TRITON_WINDOW
from fastweights.kernels.triton.windowed_token import TRITON_WINDOW_TOKEN
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import WindowedLinear
from fastweights.recurrence.mapped import Mapped
from fastweights.recurrence.windowed import WindowState
from poison import poisoned_memory
from triton_checks import TOLERANCE, relative

pytestmark = pytest.mark.sampled

IDS = torch.tensor([0] * 7 + [1] * 23 + [2] * 3 + [3] * 200)
"""Documents: two that begin within a chunk, one of which ends there."""


def streams(
    t: int = 50,
    *,
    b: int = 1,
    h: int = 2,
    g: int = 1,
    k: int = 16,
    v: int = 24,
    f: int = 20,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(t)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "q": normal(b, t, h, k),
        "k": normal(b, t, g, k),
        "v": normal(b, t, g, v),
        "fq": normal(b, t, h, f).abs(),
        "fk": normal(b, t, g, f).abs(),
        "mix": normal(b, t, h, 1).sigmoid(),
    }


def on_scale(parts: dict[str, Tensor], most: float = 60) -> dict[str, Tensor]:
    """With a scale near the scores but for some tokens, whose weights are held at their bounds."""
    scale = 0.5 * parts["q"].norm(dim=-1, keepdim=True).float()
    scale[:, ::7], scale[:, 3::7] = most, -most
    return parts | {"log_scale": scale}


def record(parts: dict[str, Tensor], window: int = 5, **options) -> WindowedLinear:
    return WindowedLinear(**parts, window=window, **options)


def with_documents(rule: WindowedLinear) -> WindowedLinear:
    b, t, _ = rule.shape
    return rule.segments(IDS[:t].expand(b, t))


def widened(state: WindowState) -> WindowState:
    return tuple(s.detach().double() if s.is_floating_point() else s for s in state)  # type: ignore[return-value]


def leaves(state: WindowState) -> WindowState:
    return tuple(s.detach().requires_grad_() if s.is_floating_point() else s for s in state)  # type: ignore[return-value]


def check(
    build: Callable[[dict[str, Tensor]], WindowedLinear],
    parts: dict[str, Tensor],
    *,
    cut: int = 0,
    tolerance: float | None = None,
) -> None:
    """Compare outputs, states and all gradients behind a prefix of `cut` tokens that the definition
    evaluates; without one, from a memory of random numbers.
    """
    given = {name: x.clone().requires_grad_() for name, x in parts.items()}
    exact = {name: x.double().requires_grad_() for name, x in parts.items()}
    rule, definition = build(given), build(exact)
    assert TRITON_WINDOW.refuses(rule) is None
    start = rule.initial_state()
    start = (*start[:3], torch.rand_like(start[3]), start[4])
    if cut:
        _, before = evaluate(definition[:cut], None, Recurrent())
        start = tuple(s.to(old.dtype) for s, old in zip(before, start, strict=True))
        rule, definition = rule[cut:], definition[cut:]
    start, exactly = leaves(start), leaves(widened(start))

    with poisoned_memory():
        o, last = TRITON_WINDOW.compute(rule, start)
        found = [o, *last[:4]]
        weights = [torch.randn(x.shape) for x in found]
        sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    expected, ended = evaluate(definition, exactly, Recurrent())
    wanted = [expected, *ended[:4]]
    sum((x * w.double()).sum() for x, w in zip(wanted, weights, strict=True)).backward()

    assert o.dtype == rule.output
    with torch.no_grad():
        assert [s.dtype for s in last] == [s.dtype for s in rule.chunk(start)[1]]
    names = ["o", "keys", "values", "features", "memory"]
    pairs = dict(zip(names, zip(found, wanted, strict=True), strict=True))
    pairs["ages"] = last[4], ended[4]
    pairs |= {f"d {n}": (given[n].grad, x.grad) for n, x in exact.items()}
    states = zip(names[1:], start[:4], exactly[:4], strict=True)
    pairs |= {f"d first {n}": (a.grad, b.grad) for n, a, b in states if b.numel()}
    limit = TOLERANCE[parts["q"].dtype] if tolerance is None else tolerance
    errors = {n: error_of(a, b) for n, (a, b) in pairs.items()}
    assert not {n: error for n, error in errors.items() if not error <= limit}


def error_of(found: Tensor | None, wanted: Tensor | None) -> float:
    """Relative, but absolute where rounding about zero is all that is wanted; infinite for ages
    that differ.
    """
    if wanted is not None and not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else float("inf")
    if wanted is None:
        return 0.0 if found is None else found.norm().item()
    if wanted.norm() < 1e-12:
        return 0.0 if found is None else found.norm().item() / max(found.numel(), 1) ** 0.5
    assert found is not None
    return relative(found, wanted)


@pytest.mark.parametrize(
    ("window", "shared"),
    [(0, True), (0, False), (1, True), (5, False), (16, True), (64, False)],
)
def test_windows(window, shared):
    check(lambda s: record(s, window, shared=shared), streams(80 if window == 64 else 50))


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (2, 2)])
def test_key_heads_serve_query_heads(heads, groups):
    check(lambda s: record(s, 20), streams(h=heads, g=groups))


@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_capped(shared):
    check(lambda s: record(s, 16, shared=shared, softcap=1.5), streams())


@pytest.mark.parametrize(
    ("window", "options"), [(0, {}), (1, {}), (5, {}), (16, {"softcap": 1.5}), (64, {})]
)
def test_scores_relative_to_a_scale(window, options):
    parts = streams(80 if window == 64 else 50, h=4, g=2)
    # where one side outweighs the other by e^40, rounding is all that γ's gradient has
    check(lambda s: record(s, window, **options), on_scale(parts), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_half_precision(dtype):
    check(lambda s: record(s, 16), on_scale(streams(70, k=32, v=16, f=32, dtype=dtype), 2))


@pytest.mark.parametrize(("window", "cut"), [(5, 0), (40, 9)])
def test_documents_and_prefixes_on_a_scale(window, cut):
    parts = on_scale(streams(b=2, h=1))
    check(lambda s: with_documents(record(s, window)), parts, cut=cut, tolerance=1e-4)


@pytest.mark.parametrize(("window", "cut"), [(0, 9), (5, 0), (40, 0), (40, 9)])
def test_documents_see_none_of_each_other(window, cut):
    check(lambda s: with_documents(record(s, window)), streams(b=2, h=1), cut=cut)


@pytest.mark.parametrize(("window", "shared"), [(0, True), (5, False), (16, True), (40, True)])
def test_a_prefix_is_continued(window, shared):
    check(lambda s: record(s, window, shared=shared), streams(60), cut=20)


@pytest.mark.parametrize("length", [1, 17, 150])
def test_lengths(length):
    check(lambda s: record(s, 16), streams(length, h=1))


def test_widths_that_are_no_powers_of_two():
    check(lambda s: record(s, 5), streams(40, h=1, k=40, v=17, f=72))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    check(lambda s: record(s, 16), streams(70, k=32, v=16, f=32, dtype=dtype))


def test_features_of_another_dtype():
    parts = streams(70, h=1, dtype=torch.bfloat16)
    parts |= {n: parts[n].float() for n in ("fq", "fk", "mix")}
    check(lambda s: record(s, 16), parts)


def test_streams_that_are_the_same_for_all_tokens_or_heads():
    parts = streams(40, h=2, g=2)
    parts |= {"mix": parts["mix"][:, :1], "k": parts["k"][:, :, :1], "fq": parts["fq"][:, :1]}
    check(lambda s: record(s, 5), parts)


@pytest.mark.parametrize("documents", [False, True])
def test_long_sequences_are_walked_in_segments(documents, monkeypatch):
    monkeypatch.setattr(windowed.WindowSizes, "segments", lambda self, parts: (1, self.chunks))
    check(
        lambda s: with_documents(record(s, 16)) if documents else record(s, 16),
        streams(110, h=1),
        cut=10,
    )


@pytest.mark.slow
def test_gradients_repeat_bit_by_bit():
    found = []
    for _ in range(2):
        parts = {n: x.requires_grad_() for n, x in streams(40, h=2).items()}
        o, last = TRITON_WINDOW.compute(rule := record(parts, 16), rule.initial_state())
        (o.sum() + last[3].sum()).backward()
        found.append([o, last[3], *(x.grad for x in parts.values())])
    assert all(map(torch.equal, *found))


def test_a_sum_without_weight_is_zero():
    parts = streams(20, h=1)
    parts |= {"fq": torch.zeros_like(parts["fq"])}
    check(lambda s: record(s, 0), parts)
    check(lambda s: record(s, 5, shared=False), parts)


# ---- features made by the kernels ----


def mapped(
    parts: dict[str, Tensor], kind: type[LearnedFeatures], columns: int, window: int, **options
) -> tuple[WindowedLinear, WindowedLinear]:
    """A record of features that are still to be made, and the same in float64."""
    torch.manual_seed(0)
    rules, wide = {}, {n: x.double() for n, x in parts.items()}
    maps = {n: kind(parts[n].shape[2], parts[n].shape[3], columns) for n in ("q", "k")}
    for map in maps.values():
        map.W.data = 0.3 * torch.randn_like(map.W)
    for name, given, of in (("given", parts, maps), ("wide", wide, deepcopy(maps))):
        of = {n: map.to(given["q"].dtype) if name == "wide" else map for n, map in of.items()}
        made = {f"f{n}": Mapped(map, given[n]) for n, map in of.items()}
        rules[name] = WindowedLinear(**{**given, **made}, window=window, **options)
    return rules["given"], rules["wide"]


@pytest.mark.parametrize("kind", [Hedgehog, Exponential, Elu, Relu])
def test_features_are_made_within(kind):
    rule, definition = mapped(streams(60, h=2, g=1), kind, 10, 5)
    with torch.no_grad(), poisoned_memory():
        first, state = TRITON_WINDOW.compute(rule[:20], rule.initial_state())
        rest, state = TRITON_WINDOW.compute(rule[20:], state)
        o, last = evaluate(definition, None, Recurrent())
    assert [s.shape for s in state] == [s.shape for s in last]
    for a, b in zip((torch.cat([first, rest], 1), *state), (o, *last), strict=True):
        assert error_of(a, b) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("shared", [True, False])
def test_made_features_in_bfloat16(shared):
    parts = streams(70, h=1, dtype=torch.bfloat16)
    rule, definition = mapped(parts, Hedgehog, 16, 16, shared=shared)
    with torch.no_grad(), poisoned_memory():
        o, state = TRITON_WINDOW.compute(rule, rule.initial_state())
        wanted, last = evaluate(definition, None, Recurrent())
    assert relative(o, wanted) <= TOLERANCE[torch.bfloat16]
    assert relative(state[3], last[3]) <= TOLERANCE[torch.bfloat16]


def test_learnt_maps_take_their_gradients():
    parts = {n: x.requires_grad_() for n, x in streams(40, h=1).items()}
    rule, definition = mapped(parts, Hedgehog, 10, 5)
    o, _ = TRITON_WINDOW.compute(rule, rule.initial_state())
    o.square().sum().backward()
    wanted, _ = evaluate(definition, None, Recurrent())
    wanted.square().sum().backward()
    for made, exact in ((rule.fq, definition.fq), (rule.fk, definition.fk)):
        assert error_of(made.map.W.grad, exact.map.W.grad) <= TOLERANCE[torch.float32]


# ---- one token ----


def decode(rule: WindowedLinear, definition: WindowedLinear, tolerance: float) -> None:
    """Token by token from the empty state, each beside the definition."""
    state, exact = rule.initial_state(), definition.initial_state()
    with torch.no_grad(), poisoned_memory():
        for token, other in zip(rule.split(1), definition.split(1), strict=True):
            assert TRITON_WINDOW_TOKEN.refuses(token) is None
            o, state = TRITON_WINDOW_TOKEN.compute(token, state)
            wanted, exact = other.step(exact)
            assert o.dtype == rule.output
            assert [s.shape for s in state] == [s.shape for s in exact]
            for a, b in zip((o, *state), (wanted, *exact), strict=True):
                assert error_of(a, b) <= tolerance


@pytest.mark.parametrize(
    ("window", "options"),
    [(0, {}), (0, {"shared": False}), (1, {}), (4, {"softcap": 1.5}), (20, {"shared": False})],
)
def test_tokens_one_by_one(window, options):
    parts = streams(6, h=2, g=1)
    exact = {n: x.double() for n, x in parts.items()}
    decode(record(parts, window, **options), record(exact, window, **options), 3e-6)


@pytest.mark.parametrize("window", [0, 4])
def test_tokens_on_a_scale(window):
    parts = on_scale(streams(9, h=2, g=1))
    exact = {n: x.double() for n, x in parts.items()}
    decode(record(parts, window), record(exact, window), 3e-6)


@pytest.mark.parametrize("window", [0, 3])
def test_tokens_with_made_features(window):
    decode(*mapped(streams(5, h=2, g=1), Hedgehog, 10, window), 3e-6)


def test_tokens_in_bfloat16():
    parts = streams(4, h=1, k=40, v=48, dtype=torch.bfloat16)
    decode(*mapped(parts, Elu, 10, 3), TOLERANCE[torch.bfloat16])


def test_a_token_behind_forgotten_ones():
    parts = streams(40, h=1)
    rule = with_documents(record(parts, 16))
    definition = with_documents(record({n: x.double() for n, x in parts.items()}, 16))
    with torch.no_grad():
        _, state = TRITON_WINDOW.compute(rule[:37], rule.initial_state())
        _, exact = definition[:37].chunk(definition.initial_state())
        token, other = (replace(r[37:38], segment_starts=None) for r in (rule, definition))
        o, state = TRITON_WINDOW_TOKEN.compute(token, state)
        wanted, exact = other.step(exact)
    for a, b in zip((o, *state), (wanted, *exact), strict=True):
        assert error_of(a, b) <= 3e-6


def test_a_token_takes_its_gradients_from_the_definition():
    parts = {n: x.requires_grad_() for n, x in streams(1).items()}
    o, _ = TRITON_WINDOW_TOKEN.compute(rule := record(parts), rule.initial_state())
    o.sum().backward()
    assert parts["v"].grad is not None


# ---- the table ----


@pytest.mark.parametrize(
    ("rule", "kernel", "why"),
    [
        (record({n: x.double() for n, x in streams(5).items()}), TRITON_WINDOW, "float32"),
        (record(streams(3, h=1, v=260)), TRITON_WINDOW, "260 wide"),
        (record(streams(5)).keep(torch.ones(1, 5).bool()), TRITON_WINDOW, "padding"),
        (record(streams(5)), TRITON_WINDOW_TOKEN, "5 tokens"),
        (with_documents(record(streams(1))), TRITON_WINDOW_TOKEN, "begin a document"),
    ],
    ids=["float64", "wide", "padding", "many", "documents"],
)
def test_refusals(rule: WindowedLinear, kernel: Kernel, why: str):
    assert why in (kernel.refuses(rule) or "")


def test_taken_where_it_can_be():
    """On a CPU compiled code comes first, but where gradients are followed."""
    followed = {name: s.requires_grad_() for name, s in streams(5).items()}
    assert f"{TRITON_WINDOW.name}: taken" in explain(record(followed))
