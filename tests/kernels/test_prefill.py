"""Many tokens of `WindowedLinear` in C, against the definition in float64: outputs and states, cut
anywhere, padded anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from cases import CASES, Case, Shape, spread, turned
from extension import compiled, every_lesser_isa
from fastweights import kernels
from fastweights.features import Elu, Exponential, Hedgehog, Landmarks, Relu
from fastweights.kernels.native import library
from fastweights.kernels.native.windowed import NATIVE_WINDOWS
from fastweights.methods import Auto, Parallel, Recurrent, evaluate
from fastweights.recurrence import WindowedLinear
from fastweights.recurrence.mapped import FeatureMap, LogScale, Mapped
from fastweights.recurrence.timeline import FORGOTTEN
from tolerances import SAME, TOLERANCE, error

pytestmark = compiled

WINDOWS = [case for case in CASES if case.name.startswith("windowed")]
MAPS: list[Callable[[int, int, int], nn.Module]] = [Hedgehog, Exponential, Elu, Relu, Landmarks]
State = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def wide(state: Any) -> State:
    return tuple(s.double() if s.is_floating_point() else s for s in state)


def in_float64(record: WindowedLinear) -> WindowedLinear:
    streams = {n: s.double() for n, s in record.streams.items() if s.is_floating_point()}
    for name in ("fq", "fk", "log_scale"):
        made = getattr(record, name)
        if isinstance(made, Mapped):
            source = streams["k" if name == "fk" else "q"]
            streams[name] = type(made)(deepcopy(made.map).double(), source)  # type: ignore[arg-type]
    return replace(record, **streams)


def narrow(case: Case, shape: Shape, dtype: torch.dtype = torch.float32) -> WindowedLinear:
    record = case.rule(**{n: s.to(dtype) for n, s in case.streams(shape).items()})
    assert isinstance(record, WindowedLinear)
    return record


def start(case: Case, shape: Shape, dtype: torch.dtype = torch.float32) -> State:
    *ring, memory, age = case.start(shape)
    return *(s.to(dtype) for s in ring), memory.float(), age


@torch.no_grad()
def assert_defined(record: WindowedLinear, state: State | None, *cuts: int) -> None:
    """A record by C in one piece or several, against the definition on the same numbers."""
    exact, begun = in_float64(record), None if state is None else wide(state)
    wanted, after = evaluate(exact, begun, Parallel())
    outputs: list[Tensor] = []
    reached: Any = state
    for begin, end in pairwise((0, *cuts, len(record))):
        with kernels.only(NATIVE_WINDOWS.name):
            o, reached = evaluate(record[begin:end], reached)
        outputs.append(o)
    allowed = SAME if record.output == torch.float32 else TOLERANCE[record.output]
    assert error(torch.cat(outputs, 1), wanted) <= allowed
    assert outputs[0].dtype == record.output
    for found, expected in zip(reached, after, strict=True):
        assert error(found, expected) <= SAME
    assert (reached[0].dtype, reached[1].dtype) == (record.k.dtype, record.v.dtype)


def mapped(
    phi: Callable[[int, int, int], nn.Module], t: int, window: int, **widths: int
) -> WindowedLinear:
    h, g, k, v, columns = {"h": 4, "g": 2, "k": 12, "v": 20, "columns": 7, **widths}.values()
    q, key, value = (torch.randn(2, t, n, width) for n, width in ((h, k), (g, k), (g, v)))
    phi_q, phi_k = phi(h, k, columns), phi(g, k, columns)
    mix, scale = torch.rand(1, 1, h, 1), None
    if phi is Landmarks:
        scale = LogScale(phi_q, q)  # type: ignore[arg-type]
    features = Mapped(phi_q, q), Mapped(phi_k, key)  # type: ignore[arg-type]
    return WindowedLinear(q, key, value, *features, mix, window, log_scale=scale)


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_every_window_is_the_definition(case: Case) -> None:
    for t, h, k, v in ((2, 2, 3, 5), (33, 4, 16, 70), (70, 1, 33, 32), (97, 6, 8, 16)):
        shape = Shape(b=2, t=t, h=h, k=k, v=v)
        record = narrow(case, shape)
        assert_defined(record, start(case, shape))
        assert_defined(record.keep(torch.rand(2, t) < torch.tensor([[0.9], [0.3]])), None, t // 2)


@pytest.mark.parametrize("phi", MAPS, ids=lambda phi: phi.__name__)
def test_features_are_made_of_queries_and_of_keys_that_leave(phi: Any) -> None:
    for window, cuts in ((0, (1, 40)), (1, ()), (5, (33,)), (40, (7, 8)), (500, (50,))):
        record = mapped(phi, 75, window)
        assert_defined(record, None, *cuts)
        assert_defined(record.keep(torch.rand(2, 75) < 0.7), None, *cuts)


@pytest.mark.parametrize("phi", [Hedgehog, Landmarks], ids=lambda phi: phi.__name__)
def test_documents_begin_anywhere(phi: Any) -> None:
    for window, cuts in ((0, ()), (1, (40,)), (5, (33, 34)), (40, (7,)), (500, (50,))):
        record = mapped(phi, 75, window)
        given = replace(record, fq=record.fq.tensor, fk=record.fk.tensor)  # type: ignore[union-attr]
        for starts in (torch.rand(2, 75) < 0.1, torch.arange(75).expand(2, 75) == 33):
            for packed in (record.restart(starts), given.restart(starts)):
                assert_defined(packed, None, *cuts)
                assert_defined(packed.keep(torch.rand(2, 75) < 0.7), None, *cuts)


@torch.no_grad()
def test_a_document_that_begins_in_padding_ends_the_one_before() -> None:
    record = mapped(Hedgehog, 40, 6)
    starts, keep = torch.arange(40) == 38, torch.arange(40) < 35
    ended = record.restart(starts.expand(2, 40)).keep(keep.expand(2, 40))
    assert_defined(ended, None)
    with kernels.only(NATIVE_WINDOWS.name):
        *rows, age = evaluate(ended)[1]
    assert not any(part.any() for part in rows)
    assert (age == FORGOTTEN).all()


def test_a_long_text_slides_through_the_strip() -> None:
    assert_defined(mapped(Hedgehog, 700, 48), None)
    assert_defined(mapped(Hedgehog, 700, 150), None, 300)


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_any_strides_and_dtype(case: Case) -> None:
    shape = Shape(b=2, t=37, h=2, k=20, v=9)
    record, state = narrow(case, shape), start(case, shape)
    assert_defined(record.map_streams(turned), state)
    assert_defined(record.map_streams(spread), state)
    single = {"q": record.q[:1], "v": record.v[:, :, :1], "mix": record.mix[:1, :1, :1]}
    assert_defined(replace(record, **single), state)
    assert_defined(narrow(case, shape, torch.bfloat16), start(case, shape, torch.bfloat16))
    mixed = {name: getattr(record, name).bfloat16() for name in ("q", "k", "mix")}
    assert_defined(replace(record, **mixed), None)


@every_lesser_isa
def test_lesser_instruction_sets(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    call = library.call
    monkeypatch.setattr(library, "call", lambda name, given: call(f"{name}_{isa}", given))
    for case in WINDOWS:
        assert_defined(narrow(case, Shape(t=45, h=4, k=20, v=37)), None, 20)
    for phi in MAPS:
        assert_defined(mapped(phi, 45, 9), None, 20)


@torch.no_grad()
def test_a_sequence_has_the_same_bits_in_every_batch() -> None:
    record, lengths = mapped(Hedgehog, 90, 33), (90, 41)
    keep = torch.arange(90) >= 90 - torch.tensor(lengths)[:, None]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        batched, state = evaluate(record.keep(keep))
    finally:
        torch.set_num_threads(threads)
    for row, length in enumerate(lengths):
        streams = {n: s if n == "mix" else s[row : row + 1] for n, s in record.streams.items()}
        streams = {n: s if n == "mix" else s[:, -length:].clone() for n, s in streams.items()}
        fq, fk = Mapped(record.fq.map, streams["q"]), Mapped(record.fk.map, streams["k"])  # type: ignore[union-attr]
        alone, after = evaluate(replace(record, **streams, fq=fq, fk=fk))
        assert torch.equal(batched[row : row + 1, -length:], alone)
        for mine, own in zip(state, after, strict=True):
            assert torch.equal(mine[row : row + 1], own)


@pytest.mark.parametrize("window", [0, 1, 9])
@torch.no_grad()
def test_padding_may_hold_anything(window: int) -> None:
    record, keep = mapped(Hedgehog, 50, window), torch.rand(2, 50) < 0.6
    filled = {
        n: s if n == "mix" else s.masked_fill(~keep[..., None, None], torch.nan)
        for n, s in record.streams.items()
    }
    fq, fk = Mapped(record.fq.map, filled["q"]), Mapped(record.fk.map, filled["k"])  # type: ignore[union-attr]
    o, state = evaluate(replace(record, **filled, fq=fq, fk=fk).keep(keep))
    wanted, after = evaluate(record.keep(keep))
    assert torch.equal(o, wanted)
    assert not o[~keep].any()
    assert all(map(torch.equal, state, after))


def test_a_sequence_of_padding_keeps_its_state() -> None:
    record = mapped(Hedgehog, 20, 6)
    keep = torch.tensor([[True], [False]]).expand(2, 20)
    _, before = evaluate(record[:9])
    o, after = evaluate(record.keep(keep), before)
    assert not o[1].any()
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1], new[1])


@pytest.mark.parametrize("scale", [1e3, 1e-6])
@pytest.mark.parametrize("phi", [Hedgehog, Elu, Landmarks], ids=lambda phi: phi.__name__)
def test_extreme_scores(phi: Any, scale: float) -> None:
    """Of powers of two, so that float32 and float64 have the same numbers."""
    record = mapped(phi, 60, 11)
    factor = 2.0 ** round(torch.tensor(scale).log2().item())
    rounded = {n: (8 * s).round() / 8 for n, s in record.streams.items() if n in ("q", "k")}
    q, k = rounded["q"] * factor, rounded["k"]
    with torch.no_grad():
        for made in (record.fq, record.fk):
            made.map.W.copy_((8 * made.map.W).round() / 8)  # type: ignore[union-attr]
    scaled = None if record.log_scale is None else LogScale(record.fq.map, q)  # type: ignore[union-attr, arg-type]
    features = {"fq": Mapped(record.fq.map, q), "fk": Mapped(record.fk.map, k)}  # type: ignore[union-attr]
    assert_defined(replace(record, q=q, k=k, **features, log_scale=scaled), None, 30)


class Sharpened(Hedgehog):
    """With a parameter that other maps do not have."""

    activate = staticmethod(lambda x: x.softmax(-1))

    def __init__(self, heads: int, width: int, features: int) -> None:
        super().__init__(heads, width, features)
        self.sharpness = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.sharpness * x)


@pytest.mark.parametrize("phi", [*MAPS, Sharpened], ids=lambda phi: phi.__name__)
@pytest.mark.parametrize("side", ["fq", "fk"])
def test_each_parameter_of_a_map_has_its_gradient_alone(phi: Any, side: str) -> None:
    for name, _ in phi(1, 1, 1).named_parameters():
        record = mapped(phi, 20, 5)
        maps = {"fq": record.fq.map, "fk": record.fk.map}  # type: ignore[union-attr]
        assert all(isinstance(map.requires_grad_(False), FeatureMap) for map in maps.values())
        parameter = maps[side].get_parameter(name).requires_grad_()
        assert "(compiled): refused: autograd follows it" in kernels.explain(record)
        o, by_definition = (evaluate(record, None, how)[0] for how in (Auto(), Recurrent()))
        found, wanted = (
            torch.autograd.grad(y.square().sum(), parameter, retain_graph=True)[0]
            for y in (o, by_definition)
        )
        assert wanted.any()
        assert error(found, wanted) <= SAME


def test_it_is_the_kernel_of_prompts() -> None:
    record = mapped(Hedgehog, 40, 5)
    with torch.no_grad():
        assert kernels.select(record) is NATIVE_WINDOWS
        assert kernels.select(record.keep(torch.rand(2, 40) < 0.5)) is NATIVE_WINDOWS
        documents = record.segments(torch.arange(40).expand(2, 40) // 20)
        assert kernels.select(documents) is NATIVE_WINDOWS
    assert "(compiled): refused: autograd follows it" in kernels.explain(record)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_gradients_are_followed_wherever_they_come_from() -> None:
    record = mapped(Hedgehog, 40, 5)
    given = replace(record, fq=record.fq.tensor.detach(), fk=record.fk.tensor.detach())  # type: ignore[union-attr]
    assert kernels.select(given) is NATIVE_WINDOWS
    for name in ("q", "k", "v", "mix", "fq", "fk"):
        leaf = getattr(given, name).clone().requires_grad_()
        o, _ = evaluate(replace(given, **{name: leaf}))
        assert torch.autograd.grad(o.sum(), leaf)[0].any()
    memory = torch.rand(2, 2, 14, 21, requires_grad=True)
    o, _ = evaluate(given, (*given.initial_state()[:3], memory, given.initial_state()[4]))
    assert torch.autograd.grad(o.sum(), memory)[0].any()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given.v, torch.ones_like(given.v))
        assert kernels.select(replace(given, v=dual)) is not NATIVE_WINDOWS
    chosen = list[Any]()

    def look(v: Tensor) -> Tensor:
        chosen.append(kernels.select(replace(given, v=v)))
        return v.sum()

    torch.func.grad(look)(given.v)
    assert chosen[0] is not NATIVE_WINDOWS
