"""`Decay` in chunks, beside its definition: every decay, width, length and layout."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastweights.kernels.triton import chunks as host
from fastweights.kernels.triton.anchored import Given, anchor, steep_scores
from fastweights.kernels.triton.chips import CHIPS, pretend
from fastweights.kernels.triton.chunks import Chunks, chunk_outputs, chunk_states
from fastweights.kernels.triton.decay import TRITON_DECAY, TRITON_NORMALIZED
from fastweights.recurrence import Decay, Delta, Normalized
from triton_checks import TOLERANCE, Streams, check, relative

pytestmark = pytest.mark.sampled


def build(streams: Streams) -> Decay:
    q, v = streams["q"], streams["v"]
    assert q is not None
    assert v is not None
    return Decay(q, streams["k"], v, streams["log_decay"], streams.get("skip"))


def make(
    t: int = 70,
    *,
    k: int = 16,
    v: int = 16,
    b: int = 1,
    h: int = 1,
    decay: str = "vector",
    rate: float = 0.2,
) -> Streams:
    """Random streams in float64; the log decays are `rate` on average.

    Args:
        t, k, v, b, h: the lengths
        decay: none, scalar, vector or tied
        rate: as it says
    """
    torch.manual_seed(t)
    kinds = {"none": 0, "scalar": 1, "vector": k, "tied": k}
    log_decay = -2 * rate * torch.rand(b, t, h, kinds[decay], dtype=torch.float64)
    return {
        "q": torch.randn(b, t, h, k, dtype=torch.float64),
        "k": None if decay == "tied" else torch.randn(b, t, h, k, dtype=torch.float64),
        "v": torch.randn(b, t, h, v, dtype=torch.float64),
        "log_decay": None if decay == "none" else log_decay,
    }


def with_decay(streams: Streams, log_decay: Tensor) -> Streams:
    return {**streams, "log_decay": log_decay}


def decay_of(streams: Streams) -> Tensor:
    log_decay = streams["log_decay"]
    assert log_decay is not None
    return log_decay


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [
        ("none", torch.float32),
        ("scalar", torch.bfloat16),
        ("vector", torch.float32),
        ("vector", torch.float16),
        ("tied", torch.bfloat16),
    ],
)
def test_every_decay_agrees_in_every_dtype(decay: str, dtype: torch.dtype) -> None:
    check(TRITON_DECAY, build, make(decay=decay), dtype)


@pytest.mark.parametrize("tokens", [1, 15, 64, 65, 150])
def test_any_length_is_cut_into_chunks(tokens: int) -> None:
    check(TRITON_DECAY, build, make(tokens, decay="vector" if tokens < 100 else "scalar"))


@pytest.mark.parametrize(
    ("k", "v", "decay"), [(20, 40, "scalar"), (20, 72, "tied"), (72, 24, "vector"), (40, 8, "none")]
)
def test_widths_need_not_fill_tiles(k: int, v: int, decay: str) -> None:
    check(TRITON_DECAY, build, make(40, k=k, v=v, decay=decay))


@pytest.mark.parametrize(
    ("tokens", "decay"),
    [((0, 31, 32), "scalar"), ((0, 31, 32), "vector"), ((3, 20), "tied"), (range(40), "vector")],
)
def test_resets_are_exact(tokens: Sequence[int], decay: str) -> None:
    streams = make(40, decay=decay)
    decay_of(streams)[:, list(tokens)] = -torch.inf
    check(TRITON_DECAY, build, streams)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_resets_are_exact_in_half_precision(decay: str) -> None:
    streams = make(decay=decay)
    decay_of(streams)[:, [0, 20, 24, 63]] = -torch.inf
    check(TRITON_DECAY, build, streams, torch.bfloat16)


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [("scalar", torch.float32), ("vector", torch.float32), ("vector", torch.bfloat16)],
)
def test_steep_decays_are_exact(decay: str, dtype: torch.dtype) -> None:
    streams = make(decay=decay)
    log_decay = decay_of(streams)
    log_decay[:, torch.rand(70) < 0.3] *= 5000
    check(TRITON_DECAY, build, streams, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mild_and_steep_chunks_stand_side_by_side(dtype: torch.dtype) -> None:
    streams = make(100)
    steep = torch.arange(100)[:, None, None] % 64 < 20
    channels = torch.arange(16) % 3 == 0
    log_decay = decay_of(streams)
    check(
        TRITON_DECAY,
        build,
        with_decay(streams, torch.where(steep & channels, 300 * log_decay, log_decay)),
        dtype,
    )


def test_streams_may_be_shared() -> None:
    streams = make(20, b=2, h=2)
    for name, axes in {"q": (0,), "k": (2,), "v": (), "log_decay": (0, 1)}.items():
        stream = streams[name]
        assert stream is not None
        for axis in axes:
            stream = stream.narrow(axis, 0, 1)
        streams[name] = stream
    check(TRITON_DECAY, build, streams)
    check(TRITON_DECAY, build, {**streams, "log_decay": decay_of(streams)[..., :1]})


def test_streams_may_lie_in_any_layout() -> None:
    def lay_out(streams: Streams) -> Decay:
        found = dict(streams)
        for name in ("q", "v"):
            stream = streams[name]
            assert stream is not None
            found[name] = stream.transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("k", "log_decay"):
            stream = streams[name]
            assert stream is not None
            found[name] = torch.cat([stream, stream + 1], -1)[..., : stream.shape[-1]]
        return build(found)

    check(TRITON_DECAY, lay_out, make(20, b=2, h=2))


@pytest.mark.parametrize("width", [1, 16])
def test_a_skip_is_added(width: int) -> None:
    streams = {**make(20), "skip": torch.randn(1, 20, 1, width, dtype=torch.float64)}
    check(TRITON_DECAY, build, streams)


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [("none", torch.float32), ("scalar", torch.bfloat16), ("vector", torch.float32)],
)
def test_time_is_walked_in_segments(
    decay: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SHORTEST_SEGMENT", 1)
    chunk = 32 if dtype == torch.float32 else 64
    with pretend(CHIPS[90]._replace(multiprocessors=1000)):
        check(TRITON_DECAY, build, make(4 * chunk + 5, decay=decay, rate=0.02), dtype)


def test_few_sequences_take_segments_and_many_do_not() -> None:
    device = torch.device("cpu")
    chunks = Chunks(1, 32768, 16, 128, 128, torch.bfloat16, 90)
    with pretend(CHIPS[90]):
        assert chunks.segment_span(64, device) == 128
        assert chunks.segment_span(512, device) == 512
        assert chunks._replace(time=1024).segment_span(64, device) == 16


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_a_strict_reader_sees_tokens_before_its_own(decay: str) -> None:
    torch.manual_seed(0)
    streams = {n: None if s is None else s.float() for n, s in make(40, decay=decay).items()}
    e, k, v, log_decay = streams["q"], streams["k"], streams["v"], streams["log_decay"]
    assert e is not None
    assert v is not None
    start = torch.randn(1, 1, 16, 16)
    chunks = Chunks.of(e, v, torch.float32)
    given = Given(e, None, k, log_decay)
    anchored = anchor(given, chunks)
    assert anchored.q is not None
    states, _ = chunk_states(start, v, anchored, chunks)
    scores = steep_scores(e, given, anchored.steep, chunks, strict=True)
    found = chunk_outputs(anchored.q, v, anchored, scores, states, chunks, strict=True)
    state, wanted = start.double(), []
    record = build(streams)
    for t in range(40):
        # the state that has decayed, before the token is written
        token = record[t : t + 1]
        decayed = Decay(token.q, torch.zeros_like(token.key), token.v, token.log_decay)
        wanted.append(decayed.step(state)[0])
        _, state = token.step(state)
    assert relative(found, torch.cat(wanted, 1)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("decay", "floor", "dtype"),
    [
        ("none", None, torch.float32),
        ("scalar", 1.0, torch.bfloat16),
        ("vector", 0.0, torch.float32),
        ("vector", 0.0, torch.float16),
    ],
)
def test_outputs_are_normalized_in_the_dtype_of_the_streams(
    decay: str, floor: float | None, dtype: torch.dtype
) -> None:
    def normalize(streams: Streams) -> Normalized:
        return Normalized(build(streams), streams.get("floor") if floor == 0 else floor)

    streams = make(40, v=20, decay=decay)
    for name in ("q", "k"):
        stream = streams[name]
        assert stream is not None
        streams[name] = stream.abs()
    if floor == 0:
        streams["floor"] = 20 * torch.rand(1, 40, 1, 1, dtype=torch.float64)
    check(TRITON_NORMALIZED, normalize, streams, dtype, wide=("log_decay", "floor"))


def test_other_rules_are_normalized_around_their_own_kernels() -> None:
    x = torch.ones(1, 4, 1, 16)
    refusal = TRITON_NORMALIZED.refuses(Normalized(Delta(x, x, x, x[..., :1], None)))
    assert refusal == "its inner rule is Delta, not Decay"
    wide = Normalized(Decay(x, x, x.repeat(1, 1, 1, 16), None))
    assert "16 × 257, wider than 256" in (TRITON_NORMALIZED.refuses(wide) or "")


def test_what_the_kernels_do_not_take_is_said() -> None:
    def refusal(**changes: object) -> str | None:
        streams = {**make(4), **changes}
        return TRITON_DECAY.refuses(build(streams))

    assert "torch.float64" in (refusal() or "")
    single = {n: None if s is None else s.float() for n, s in make(4).items()}
    assert refusal(**single) is None
    q = single["q"]
    assert q is not None
    assert refusal(**{**single, "q": q.to(torch.complex64)}) == "its streams are complex"
    assert "narrower than 8" in (refusal(**{**single, "v": q[..., :4]}) or "")
    assert "wider than 256" in (refusal(**{**single, "v": q.repeat(1, 1, 1, 17)}) or "")
