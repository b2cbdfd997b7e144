"""The kernels behind `Auto()`: equal to the definition, chosen for the records they are for, small
in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastweights import MIXERS, Recurrent
from fastweights.kernels import TABLE, Kernel, explain
from fastweights.layers import TokenContext
from fastweights.recurrence import Bonus, Decay, Delta, Normalized, Softmax, WindowedLinear
from fastweights.recurrence.base import Recurrence, State
from tolerances import assert_close

LENGTHS = (1, 2, 31, 32, 33, 100, 257)
DTYPES = (torch.float64, torch.float32)
HEADS = 5
KERNELS = {kernel.name: kernel for kernel in TABLE}
SCAN = KERNELS["blocked scan (torch)"]
WINDOWED = KERNELS["windowed attention, block by block (torch)"]
BLOCKED_WINDOWS = KERNELS["windows and linear memory, block by block (torch)"]

Make = Callable[[int, torch.dtype], Recurrence]


def torch_kernel(recurrence: Recurrence) -> Kernel:
    """The kernel that a machine without the compiled extension takes."""
    lines = [line.partition(": ") for line in explain(recurrence).splitlines()]
    return next(
        KERNELS[name]
        for name, _, verdict in lines
        if "(torch)" in name and verdict in ("taken", "possible")
    )


def stream(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def log(*shape: int, dtype: torch.dtype) -> Tensor:
    """Log decays, with an angle if `dtype` is complex, and a reset every eleventh token."""
    real = -torch.rand(*shape, dtype=dtype.to_real())
    real[:, 7::11] = -torch.inf
    return torch.complex(real, torch.randn_like(real)) if dtype.is_complex else real


def elementwise(t: int, dtype: torch.dtype) -> Decay:
    shape = (2, t, HEADS, 1)
    return Decay(*(stream(*shape, dtype=dtype) for _ in range(3)), log(*shape, dtype=dtype))


def tied(t: int, dtype: torch.dtype) -> Decay:
    gate, skip = log(2, t, HEADS, 1, dtype=dtype), stream(1, 1, HEADS, 1, dtype=dtype)
    return Decay(
        torch.ones(1, 1, 1, 1, dtype=dtype), None, stream(2, t, HEADS, 1, dtype=dtype), gate, skip
    )


def rotating(t: int, dtype: torch.dtype) -> Decay:
    """LRU: complex decays and keys, real values."""
    wide, shape = dtype.to_complex(), (2, t, HEADS, 1)
    return Decay(*(stream(*shape, dtype=d) for d in (wide, wide, dtype)), log(*shape, dtype=wide))


def rotating_tied(t: int, dtype: torch.dtype) -> Decay:
    wide, shape = dtype.to_complex(), (2, t, HEADS, 1)
    return Decay(
        stream(*shape, dtype=dtype), None, stream(*shape, dtype=dtype), log(*shape, dtype=wide)
    )


def diagonal(t: int, dtype: torch.dtype) -> Decay:
    """S4D: all but the values constant in time and over the batch."""
    wide, shape = dtype.to_complex(), (1, 1, HEADS, 4)
    constant = torch.complex(-torch.rand(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    q, k = stream(*shape, dtype=wide), stream(*shape, dtype=wide)
    return Decay(q, k, stream(2, t, HEADS, 1, dtype=dtype), constant)


def selective(t: int, dtype: torch.dtype) -> Decay:
    q, k = stream(2, t, 1, 4, dtype=dtype), stream(2, t, 1, 4, dtype=dtype)
    return Decay(q, k, stream(2, t, HEADS, 1, dtype=dtype), log(2, t, HEADS, 4, dtype=dtype))


def selective_own_keys(t: int, dtype: torch.dtype) -> Decay:
    q, k = stream(2, t, 1, 4, dtype=dtype), stream(2, t, HEADS, 4, dtype=dtype)
    return Decay(q, k, stream(2, t, HEADS, 1, dtype=dtype), log(2, t, HEADS, 4, dtype=dtype))


def scalar(t: int, dtype: torch.dtype) -> Decay:
    q, k, v = (stream(2, t, HEADS, width, dtype=dtype) for width in (2, 2, 2))
    return Decay(q, k, v, log(2, t, 1, 1, dtype=dtype))


def undecayed(t: int, dtype: torch.dtype) -> Decay:
    q, k, v = (stream(2, t, HEADS, width, dtype=dtype) / t**0.5 for width in (2, 2, 2))
    return Decay(q, k, v, None)


def padded(t: int, dtype: torch.dtype) -> Recurrence:
    kept = torch.arange(t) >= torch.tensor([[0], [t // 2]])
    return selective(t, dtype).keep(kept)


def packed(t: int, dtype: torch.dtype) -> Recurrence:
    return elementwise(t, dtype).segments(
        torch.arange(t).div(13, rounding_mode="floor").expand(2, t)
    )


SCANS = (
    elementwise,
    tied,
    rotating,
    rotating_tied,
    diagonal,
    selective,
    selective_own_keys,
    scalar,
    undecayed,
)


def steep_delta(t: int, dtype: torch.dtype) -> Delta:
    q, k, v = (stream(2, t, 2, 4, dtype=dtype) for _ in range(3))
    beta = torch.rand(2, t, 2, 1, dtype=dtype)
    return Delta(
        q, torch.nn.functional.normalize(k, dim=-1), v, beta, 9 * log(2, t, 2, 4, dtype=dtype)
    )


def outcome(
    recurrence: Recurrence, state: State, run: Callable[[Recurrence, State], tuple[Tensor, State]]
):
    """o, the final state, and the gradients of everything, by name; both o and the state
    are read.
    """
    parts = state if isinstance(state, tuple) else (state,)
    leaves = {**recurrence.streams, **{f"state {i}": part for i, part in enumerate(parts)}}
    leaves = {
        n: s for n, s in leaves.items() if (s.is_floating_point() or s.is_complex()) and s.numel()
    }
    for leaf in leaves.values():
        leaf.detach_().requires_grad_()
    o, final = run(recurrence, state)
    generator = torch.Generator().manual_seed(1)
    found = {"o": o} | {
        f"final {i}": f for i, f in enumerate(final if isinstance(final, tuple) else (final,))
    }
    exact = torch.promote_types(o.dtype, torch.float64)
    loss = torch.zeros((), dtype=exact)
    for part in found.values():
        if part.is_floating_point() or part.is_complex():
            loss = loss + (part * torch.randn(part.shape, generator=generator, dtype=exact)).sum()
    gradients = torch.autograd.grad(loss.real, list(leaves.values()), allow_unused=True)
    return found | {
        f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None
    }


def wide(x: Tensor) -> Tensor:
    return (
        x.to(torch.promote_types(x.dtype, torch.float64))
        if x.is_floating_point() or x.is_complex()
        else x
    )


def check(
    kernel: Kernel, make: Make, t: int, dtype: torch.dtype, state: State | None = None
) -> None:
    """The kernel, in `dtype`, against the definition in float64."""
    torch.manual_seed(t)
    recurrence = make(t, dtype)
    assert kernel.refuses(recurrence) is None
    if state is None:
        state = stream(*recurrence.state_shapes[0], dtype=recurrence.accumulator)
    got = outcome(recurrence, state, kernel.compute)
    exact = replace(recurrence, **{name: wide(s) for name, s in recurrence.streams.items()})
    want = outcome(
        exact,
        tuple(map(wide, state)) if isinstance(state, tuple) else wide(state),
        Recurrent().evaluate,
    )
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_close(got[name], tensor, name, dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("make", [*SCANS, padded, packed], ids=lambda make: make.__name__)
def test_scan_is_the_definition(make: Make, t: int, dtype: torch.dtype) -> None:
    check(SCAN, make, t, dtype)


@pytest.mark.parametrize("make", SCANS, ids=lambda make: make.__name__)
def test_scan_one_token_after_the_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.kernels.scan.BUSY", 1)
    check(SCAN, make, 100, torch.float64)


def test_scan_reads_decays_in_any_memory_layout() -> None:
    record = selective(70, torch.float64)
    turned = Decay(record.q, record.k, record.v, record.log_decay.mT.contiguous().mT)
    start = record.initial_state()
    assert_close(SCAN.compute(turned, start)[0], SCAN.compute(record, start)[0], "o")


@pytest.mark.parametrize("t", [64, 65, 100])
def test_steep_delta_is_the_definition(t: int) -> None:
    check(KERNELS["blocked delta (torch)"], steep_delta, t, torch.float64)


def test_a_steep_decay_that_all_tokens_share_is_the_definition() -> None:
    """Of length 1 in time, as RetNet's and TransNormer's; a chunk decays by it many times."""

    def shared(t: int, dtype: torch.dtype) -> Decay:
        q, k, v = (stream(2, t, 2, width, dtype=dtype) for width in (8, 8, 4))
        return Decay(q, k, v, torch.tensor([[[[-30.0], [-0.1]]]], dtype=dtype))

    check(KERNELS["blocked decay (torch)"], shared, 70, torch.float64)


def windowed(t: int, dtype: torch.dtype, window: int = 9) -> Softmax:
    q, k, v = (stream(2, t, heads, 4, dtype=dtype) for heads in (4, 2, 2))
    return Softmax(q, k, v, window)


def windowed_padded(t: int, dtype: torch.dtype) -> Softmax:
    return windowed(t, dtype).keep(torch.rand(2, t) > torch.tensor([[0.0], [0.9]]))


def windowed_packed(t: int, dtype: torch.dtype) -> Softmax:
    return windowed(t, dtype).segments(torch.arange(t).div(50, rounding_mode="floor").expand(2, t))


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize(
    "make", [windowed, windowed_padded, windowed_packed], ids=lambda make: make.__name__
)
def test_windowed_attention_is_the_definition(make: Make, past: int) -> None:
    torch.manual_seed(past)
    before = windowed(past, torch.float64) if past else None
    with torch.no_grad():
        state = (
            windowed(1, torch.float64).initial_state()
            if before is None
            else before.chunk(before.initial_state())[1]
        )
    check(WINDOWED, make, 300, torch.float64, state)


def linear_beyond(
    t: int, dtype: torch.dtype, window: int = 9, shared: bool = True
) -> WindowedLinear:
    q, k, v, fq, fk = (stream(2, t, heads, 4, dtype=dtype) for heads in (4, 2, 2, 4, 2))
    return WindowedLinear(
        q, k, v, fq.exp(), fk.exp(), torch.rand(1, 1, 4, 1, dtype=dtype), window, shared
    )


def linear_beyond_padded(t: int, dtype: torch.dtype) -> WindowedLinear:
    return linear_beyond(t, dtype).keep(torch.rand(2, t) > torch.tensor([[0.3], [0.9]]))


def linear_beyond_packed(t: int, dtype: torch.dtype) -> WindowedLinear:
    return linear_beyond(t, dtype).segments(
        torch.arange(t).div(25, rounding_mode="floor").expand(2, t)
    )


def linear_beyond_both(t: int, dtype: torch.dtype) -> WindowedLinear:
    both = linear_beyond_packed(t, dtype).keep(torch.rand(2, t) > torch.tensor([[0.0], [0.5]]))
    return replace(both, shared=False)


def linear_alone(t: int, dtype: torch.dtype) -> WindowedLinear:
    return linear_beyond(t, dtype, window=0)


def one_key_window(t: int, dtype: torch.dtype) -> WindowedLinear:
    return linear_beyond(t, dtype, window=1, shared=False)


def capped_windows(t: int, dtype: torch.dtype) -> WindowedLinear:
    return replace(linear_beyond_padded(t, dtype), softcap=1.5)


def capped_apart(t: int, dtype: torch.dtype) -> WindowedLinear:
    return replace(linear_beyond_packed(t, dtype), softcap=1.5, shared=False)


def wide_window(t: int, dtype: torch.dtype) -> WindowedLinear:
    """Wider than all tokens, or than all but a few, as they come after none, five or forty."""
    return linear_beyond(t, dtype, window=103).keep(torch.rand(2, t) > torch.tensor([[0.0], [0.5]]))


BEYOND = (
    linear_beyond,
    linear_beyond_padded,
    linear_beyond_packed,
    linear_beyond_both,
    linear_alone,
    one_key_window,
    capped_windows,
    capped_apart,
    wide_window,
)


@pytest.mark.sampled
@pytest.mark.parametrize(("past", "fewest", "most"), [(0, 8, 256), (40, 8, 256), (5, 4, 4)])
@pytest.mark.parametrize("make", BEYOND, ids=lambda make: make.__name__)
def test_blocked_windows_are_the_definition(
    make: Make, past: int, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastweights.kernels.windowed.plan.FEWEST", fewest)
    monkeypatch.setattr("fastweights.kernels.windowed.plan.MOST", most)
    torch.manual_seed(past)
    before, dtype = make(max(past, 1), torch.float64), torch.float64
    with torch.no_grad():
        state = before.chunk(before.initial_state())[1] if past else before.initial_state()
    for t in (1, 70):
        check(BLOCKED_WINDOWS, make, t, dtype, state)


def saved_bytes(record: Recurrence) -> int:
    """Bytes kept for the backward, each memory counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for s in record.streams.values():
        s.detach_().requires_grad_(s.is_floating_point())
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        torch_kernel(record).compute(record, record.initial_state())
    return sum(storages.values())


def stream_bytes(record: Recurrence) -> int:
    return sum(s.nbytes for s in record.streams.values())


def test_scan_keeps_streams_and_block_starts_only() -> None:
    record = Decay(
        *(torch.randn(1, 512, 1, 16) for _ in range(2)),
        torch.randn(1, 512, 512, 1),
        -torch.rand(1, 512, 512, 16),
    )
    state, blocks = record.initial_state().nbytes, 512 // 32
    assert saved_bytes(record) <= stream_bytes(record) + blocks * state
    assert blocks * state <= record.log_decay.nbytes / 32


def test_steep_delta_keeps_streams_and_chunk_starts_only() -> None:
    q, k, v = (torch.randn(1, 512, 2, 32) for _ in range(3))
    record = Delta(q, k / 6, v, torch.rand(1, 512, 2, 1), -20 * torch.rand(1, 512, 2, 32))
    assert saved_bytes(record) <= stream_bytes(record) + 512 // 64 * record.initial_state().nbytes


@pytest.mark.parametrize("make", [windowed, linear_beyond], ids=lambda make: make.__name__)
def test_windowed_attention_keeps_memory_linear_in_time(make: Make) -> None:
    short, long = (make(t, torch.float32) for t in (512, 2048))
    assert saved_bytes(long) <= 4.4 * saved_bytes(short)


KERNEL_OF = {
    "gla": "blocked decay (torch)",
    "metala": "blocked decay (torch)",
    "mamba": "blocked scan (torch)",
    "mamba2": "blocked decay (torch)",
    **dict.fromkeys(["dss", "s4d", "s5", "lru", "rglru", "qlstm"], "blocked scan (torch)"),
    "h3": "chunk loop (torch)",
    "gated_deltanet": "blocked delta (torch)",
    "mesa": "blocked mesa (torch)",
    "softmax": "fused attention (torch)",
}


@pytest.mark.parametrize("name", KERNEL_OF)
def test_each_mixer_goes_by_the_kernel_for_its_record(name: str) -> None:
    x = torch.randn(1, 300, 64)
    record, _ = MIXERS[name](d=64).project(x, TokenContext.start(x))
    assert torch_kernel(record.innermost).name == KERNEL_OF[name]


def amplified_record(name: str) -> Decay | Bonus:
    """What is left of the mixer's record once gains and normaliser are in the streams."""
    x = torch.randn(1, 300, 64)
    record, _ = MIXERS[name](d=64).project(x, TokenContext.start(x))
    return record.rescale(record.initial_state()[1])[0].append_ones()


def test_exponential_gates_go_by_the_kernels_of_plain_ones() -> None:
    assert torch_kernel(amplified_record("mlstm")).name == "blocked decay (torch)"
    assert torch_kernel(amplified_record("rwkv4").shift_queries()) is SCAN


def test_a_window_goes_block_by_block_once_there_are_three_blocks() -> None:
    assert torch_kernel(windowed(129, torch.float32)) is WINDOWED
    assert torch_kernel(windowed(128, torch.float32)) is not WINDOWED
    assert torch_kernel(windowed(600, torch.float32, window=300)) is not WINDOWED


def test_a_normalised_scan_is_a_scan() -> None:
    """RWKV-4: one key and one value per head, and the normaliser as a second value."""
    ones = torch.ones(1, 1, 1, 1)
    record = Normalized(
        Decay(ones, torch.rand(1, 40, 8, 1), torch.randn(1, 40, 8, 1), -torch.rand(1, 1, 8, 1))
    )
    assert torch_kernel(record.append_ones()) is SCAN


def test_large_states_are_refused() -> None:
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    assert (
        SCAN.refuses(Decay(q, k, v, None)) == "its states have 8·8 elements per head, more than 4"
    )
    assert SCAN.refuses(Decay(q, k, v[..., :1], None)) is None
    assert SCAN.refuses(Decay(q[..., :1], k[..., :1], v, None)) is None
    assert SCAN.refuses(Decay(q.to(torch.complex64), k, v, None)) is None
