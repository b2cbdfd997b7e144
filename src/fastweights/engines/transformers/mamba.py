"""The selective scans of Mamba, with a decay per channel and state row, and Mamba-2's, with one per
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.engines.transformers.documents import evaluate_rows
from fastweights.engines.transformers.substitute import Call, Substitute
from fastweights.layers import upcast
from fastweights.recurrence import Decay
from fastweights.recurrence.selective import Selective

PACKAGE = "mamba_ssm"
ANY_STEP = (0.0, float("inf"))


def scan_channels(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba's scan of x, Δ and the gate z ``[b d t]``, A ``[d n]`` and B, C ``[b n t]``."""
    del use_mambapy, use_associative_scan
    x = hidden_states.transpose(1, 2)
    delta = _step_size(dt.transpose(1, 2), delta_bias, delta_softplus)
    record = _channels(x, delta, A, B.mT, C.mT)
    o, state = evaluate_rows(record, kwargs)
    y = _finish(o[..., 0].to(x.dtype), x, D, None if z is None else z.transpose(1, 2))
    y = y.transpose(1, 2)
    return (y, state[..., 0]) if return_last_state else y


def advance_channels(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The same of one token ``[b d]``; `state` ``[b d n]`` is moved on. So little work is done
    before a record of it is made.
    """
    delta = _step_size(dt, dt_bias, dt_softplus)
    decay = (delta[..., None] * upcast(A)).exp()
    written = (delta * hidden_states)[..., None]
    following = torch.addcmul(decay * upcast(state), written, upcast(B)[:, None])
    state.copy_(following)
    o = (following @ upcast(C)[..., None])[..., 0]
    y = _finish(o.to(hidden_states.dtype), hidden_states, D, z)
    return y.to(hidden_states.dtype)


def _channels(x: Tensor, delta: Tensor, rate: Tensor, k: Tensor, q: Tensor) -> Selective:
    """The record of x and Δ ``[b t d]``, A ``[d n]``, B and C ``[b t n]``."""
    v = (delta * x)[..., None]
    return Selective(
        upcast(q)[:, :, None],
        upcast(k)[:, :, None],
        v,
        -delta[..., None],
        -upcast(rate)[None, None],
    )


def _step_size(
    dt: Tensor, bias: Tensor | None, softplus: bool, limits: tuple[float, float] = ANY_STEP
) -> Tensor:
    """Δ, in float32 at least."""
    delta = upcast(dt if bias is None else dt + bias.to(dt.dtype))
    delta = F.softplus(delta) if softplus else delta
    return delta if tuple(limits) == ANY_STEP else delta.clamp(*limits)


def _finish(y: Tensor, x: Tensor, skip: Tensor | None, gate: Tensor | None) -> Tensor:
    y = y if skip is None else torch.addcmul(y, x, skip)
    return y if gate is None else y * F.silu(gate)


def scan_heads(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ANY_STEP,
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan of x ``[b t h p]``, Δ ``[b t h]``, A and D ``[h]``, B and C ``[b t g n]`` and
    the state ``[b h p n]``.
    """
    del chunk_size
    x, delta = upcast(hidden_states), _step_size(dt, dt_bias, dt_softplus, dt_limit)
    record = _heads(x, delta, A, B, C)
    before = None if initial_states is None else upcast(initial_states).mT
    o, state = evaluate_rows(record, kwargs, before)
    y = _finish(o, x, None if D is None else D[:, None], z)
    return (y, state.mT) if return_final_states else y


def advance_heads(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The same of one token ``[b h p]``; Δ and its bias ``[… h p]`` and A ``[h p n]`` repeat one
    number per head, and `state` ``[b h p n]`` is moved on.
    """
    if dt.stride(-1) or A.stride(-1) or (dt_bias is not None and dt_bias.stride(-1)):
        return NotImplemented
    delta = _step_size(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    x = upcast(hidden_states)[:, None]
    record = _heads(x, delta[:, None], A[:, 0, 0], B[:, None], C[:, None])
    o, following = evaluate_rows(record, {}, upcast(state).mT)
    state.copy_(following.mT)
    return _finish(o[:, 0], hidden_states, D, z).to(hidden_states.dtype)


def _heads(x: Tensor, delta: Tensor, rate: Tensor, k: Tensor, q: Tensor) -> Decay:
    groups = k.shape[2]
    served = 1 if groups == 1 else x.shape[2] // groups
    q, k = (upcast(s) if served == 1 else upcast(s).repeat_interleave(served, 2) for s in (q, k))
    return Decay(q, k, x * delta[..., None], (delta * upcast(rate))[..., None])


def take_parts(*_: Any, **__: Any) -> None:
    """What fuses a whole layer gives None where it is not installed, and then the layer calls the
    parts, which are ours, and leaves its output's projection to the module, with its adapters.
    """


def _channel_calls() -> Iterator[Call]:
    b, d, n, t = 2, 6, 4, 9
    x, dt, z = torch.randn(3, b, d, t)
    keys, bias = torch.randn(2, b, n, t), torch.randn(d)
    call = (x, dt, -torch.rand(d, n), *keys)
    yield Call(
        call,
        {
            "D": torch.randn(d),
            "z": z,
            "delta_bias": bias,
            "delta_softplus": True,
            "return_last_state": True,
        },
    )
    yield Call((x, dt.abs(), *call[2:]))


def _next_channel_calls() -> Iterator[Call]:
    b, d, n = 2, 6, 4
    x, dt, z = torch.randn(3, b, d)
    call = (torch.randn(b, d, n), x, dt, -torch.rand(d, n), *torch.randn(2, b, n), torch.randn(d))
    yield Call(call, {"z": z, "dt_bias": torch.randn(d), "dt_softplus": True})
    yield Call((*call[:2], dt.abs(), *call[3:6]))


def _head_calls() -> Iterator[Call]:
    b, t, h, p, g, n = 2, 9, 4, 3, 2, 5
    x, dt, rate = torch.randn(b, t, h, p), torch.randn(b, t, h), -torch.rand(h)
    keys = torch.randn(2, b, t, g, n)
    for limit, state in ((ANY_STEP, None), ((0.2, 0.9), torch.randn(b, h, p, n))):
        yield Call(
            (x, dt, rate, *keys),
            {
                "chunk_size": 4,
                "D": torch.randn(h),
                "dt_bias": torch.randn(h),
                "initial_states": state,
                "dt_softplus": True,
                "dt_limit": limit,
                "return_final_states": True,
            },
        )


def _next_head_calls() -> Iterator[Call]:
    b, h, p, g, n = 2, 4, 3, 2, 5
    x, state = torch.randn(b, h, p), torch.randn(b, h, p, n)
    dt, bias = torch.randn(b, h, 1).expand(b, h, p), torch.randn(h, 1).expand(h, p)
    rate, skip = torch.rand(h, 1, 1).neg().expand(h, p, n), torch.randn(h, 1).expand(h, p)
    call = (state, x, dt, rate, *torch.randn(2, b, g, n), skip)
    yield Call(call, {"z": None, "dt_bias": bias, "dt_softplus": True})


def _whole_layers() -> Iterator[Call]:
    yield Call((None,) * 8)


SCANS = (
    Substitute("mamba_selective_scan", scan_channels, _channel_calls, PACKAGE),
    Substitute("mamba_selective_state_update", advance_channels, _next_channel_calls, PACKAGE),
    Substitute("mamba2_chunk_scan", scan_heads, _head_calls, PACKAGE),
    Substitute("mamba2_selective_state_update", advance_heads, _next_head_calls, PACKAGE),
    Substitute("mamba_inner_fn", take_parts, _whole_layers, PACKAGE),
    Substitute("mamba2_split_conv1d_scan_combined", take_parts, _whole_layers, PACKAGE),
)
