"""One token of `WindowedLinear` through the compiled extension: windowed.c."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.decay_delta import CPU, refuses
from fastweights.kernels.native.memory import empty
from fastweights.kernels.table import Kernel
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import WindowedLinear, WindowState

CODE = "fw_window_step"

FeaturelessWindowState = tuple[Tensor, Tensor, Tensor, Tensor]
"""`WindowState` without features: (keys, values, memory, age)."""


class WindowRule(NamedTuple):
    """What is the same for all tokens: the fields of `WindowedLinear`, and what scores q·k are
    multiplied by.
    """

    window: int
    shared: bool
    scale: float
    softcap: float | None

    def cache_length_after(self, cached: int) -> int:
        """How many tokens are cached after the next."""
        return cached + (cached + 1 < self.window)


class LearnedFeatureMap(NamedTuple):
    """Features to be made of queries and of keys that leave the window: f, a name of
    `abi.FeatureMap`, and W ``[h·f/2 k]``.
    """

    f: str
    W_q: Tensor
    W_k: Tensor

    def fields(self) -> dict[str, Any]:
        """Those of ``WindowStep`` that say where features come from."""
        number = abi.FeatureMap[self.f.upper()]
        return {"map": number, "W_q": self.W_q, "W_k": self.W_k}


class TokenFeatures(NamedTuple):
    """Features of the token ``[b 1 h f]``, ``[b 1 g f]``, those of the cache ``[b g s f]``, and
    room for the next.
    """

    fq: Tensor
    fk: Tensor
    cached: Tensor
    following: Tensor

    def fields(self) -> dict[str, Any]:
        """As `LearnedFeatureMap.fields`."""
        return {
            "fq": self.fq,
            "fk": self.fk,
            "features": self.cached,
            "next_features": self.following,
        }


def window_step(
    rule: WindowRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    features: LearnedFeatureMap | TokenFeatures,
    state: FeaturelessWindowState,
) -> tuple[Tensor, FeaturelessWindowState]:
    """(o ``[b 1 h v]`` in float32, the state behind the token) of streams and a state that fit each
    other.
    """
    streams = [_single(s) for s in (q, k, v, mix)]
    keys, values, memory, age = (
        s.contiguous() for s in (_single(state[0]), _single(state[1]), *state[2:])
    )
    (b, g, f, width), h, cached = memory.shape, q.shape[2], age.shape[1]
    kept = rule.cache_length_after(cached)
    o, after = torch.empty(b, 1, h, width - 1), torch.empty(b, kept, dtype=torch.long)
    ring = torch.empty(b, g, kept, keys.shape[3]), torch.empty(b, g, kept, width - 1)
    written = empty(b, g, f, width)
    sizes = (b, h, g, keys.shape[3], width - 1, f, rule.window, cached, rule.shared, FORGOTTEN)
    constants = (rule.scale, rule.softcap or 0.0, library.threads(memory.numel()))
    places = (*streams, keys, values, age, memory, o, *ring, after, written)
    library.call(CODE, abi.WindowStep(*sizes, *constants, *places, **features.fields()))
    dtypes = (
        torch.promote_types(state[0].dtype, k.dtype),
        torch.promote_types(state[1].dtype, v.dtype),
    )
    return o, (ring[0].to(dtypes[0]), ring[1].to(dtypes[1]), written, after)


def _single(stream: Tensor) -> Tensor:
    return stream if stream.dtype == torch.float32 else stream.float()


def step_with_feature_map(
    rule: WindowRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Tensor,
    features: LearnedFeatureMap,
    state: FeaturelessWindowState,
) -> tuple[Tensor, FeaturelessWindowState] | None:
    """`window_step`, or None for what C cannot read, autograd wants to see, or `only` leaves to
    another kernel.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or q.shape[1] != 1:
        return None
    weights = features.W_q, features.W_k
    if library.refuse_tensors(*weights) or not all(W.is_contiguous() for W in weights):
        return None
    if q.device.type != "cpu" or torch.promote_types(q.dtype, torch.float32) != torch.float32:
        return None
    (b, _, g, width), values, s = k.shape, v.shape[3], state[3].shape[1]
    f = 2 * len(features.W_k) // g
    fits = tuple(part.shape for part in state) == (
        (b, g, s, width),
        (b, g, s, values),
        (b, g, f, values + 1),
        (b, s),
    )
    return window_step(rule, q, k, v, mix, features, state) if fits else None


def _run(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    keys, values, features, memory, age = state
    if torch.is_grad_enabled() and any(
        s.requires_grad for s in (*recurrence.streams.values(), *state)
    ):
        return recurrence.step(state)
    (b, t, h), g = recurrence.shape, recurrence.groups
    q, fq, mix = (s.expand(b, t, h, -1) for s in (recurrence.q, recurrence.fq, recurrence.mix))
    k, v, fk = (s.expand(b, t, g, -1) for s in (recurrence.k, recurrence.v, recurrence.fk))
    rule = WindowRule(recurrence.window, recurrence.shared, q.shape[-1] ** -0.5, recurrence.softcap)
    following = torch.empty(b, g, rule.cache_length_after(age.shape[1]), fk.shape[-1])
    given = TokenFeatures(_single(fq), _single(fk), _single(features).contiguous(), following)
    o, (keys, values, memory, age) = window_step(
        rule, q, k, v, mix, given, (keys, values, memory, age)
    )
    return o.to(recurrence.output), (keys, values, following.to(features.dtype), memory, age)


def _refuses(recurrence: WindowedLinear) -> str | None:
    if len(recurrence) != 1:
        return f"it has {len(recurrence)} tokens, not one"
    if recurrence.keep_mask is not None or recurrence.segment_starts is not None:
        return "its token may be padding or begin a document"
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of the step's own operations"
    return refuses(recurrence)


NATIVE_WINDOW = Kernel(
    "window and linear memory, one token (compiled)", WindowedLinear, _run, _refuses, CPU
)
