"""One token of `WindowedLinear` through the compiled extension: windowed.c."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.decay_delta import CPU, refuses
from fastweights.kernels.native.memory import empty
from fastweights.kernels.pages import InPages
from fastweights.kernels.table import Kernel
from fastweights.recurrence.mapped import (
    LogScale,
    Mapped,
    ScaledMap,
    elu_plus_one,
    features,
    softmax,
)
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

    @classmethod
    def of(cls, recurrence: WindowedLinear) -> Self:
        scale = recurrence.q.shape[-1] ** -0.5
        return cls(recurrence.window, recurrence.shared, scale, recurrence.softcap)

    def cache_length_after(self, cached: int) -> int:
        """How many tokens are cached after the next."""
        return cached + (cached + 1 < self.window)


class LearnedFeatures(NamedTuple):
    """Features that C makes of q and of keys that leave the window: f, and W ``[h·f/2 k]``; of
    landmarks W ``[h·f k]`` and b ``[h·f]``, from which it has the log scale, too.
    """

    f: abi.FeatureMap
    W_q: Tensor
    W_k: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None

    def fields(self) -> dict[str, Any]:
        """Those of ``WindowStep`` that say where features come from."""
        matrices = {"W_q": self.W_q, "W_k": self.W_k}
        return {"map": self.f, **matrices, "b_q": self.b_q, "b_k": self.b_k}


ACTIVATIONS = {
    softmax: abi.FeatureMap.SOFTMAX,
    torch.exp: abi.FeatureMap.EXP,
    elu_plus_one: abi.FeatureMap.ELU,
    F.relu: abi.FeatureMap.RELU,
}
"""The f of `Mapped` features that C knows."""


def learned_features(recurrence: WindowedLinear) -> LearnedFeatures | None:
    """What C makes the features of this record with; None where it cannot, as they are there, or
    of other streams than q and k, or by a map that it does not know.
    """
    fq, fk = recurrence.fq, recurrence.fk
    if not (isinstance(fq, Mapped) and isinstance(fk, Mapped)):
        return None
    same = fq.stream is recurrence.q and fk.stream is recurrence.k
    if fk.map.activate is not fq.map.activate or not same:
        return None
    f, *parameters = _function(recurrence, fq.map, fk.map)
    if f is None or library.refuse_tensors(*parameters):
        return None
    return LearnedFeatures(f, *parameters) if all(p.is_contiguous() for p in parameters) else None


def _function(recurrence: WindowedLinear, phi_q: Any, phi_k: Any) -> tuple[Any, ...]:
    """f, None if C does not know it, and the parameters of both maps."""
    W, scale = (phi_q.W, phi_k.W), recurrence.log_scale
    if not isinstance(scale, LogScale):
        return ACTIVATIONS.get(phi_q.activate), *W
    own = scale.map is phi_q and scale.stream is recurrence.q
    return abi.FeatureMap.LANDMARKS if own else None, *W, phi_q.b, phi_k.b


class TokenFeatures(NamedTuple):
    """Features of the token ``[b 1 h f]``, ``[b 1 g f]``, those of the cache ``[b g s f]``, and
    room for the next.
    """

    fq: Tensor
    fk: Tensor
    cached: Tensor
    following: Tensor

    def fields(self) -> dict[str, Any]:
        """As `LearnedFeatures.fields`."""
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
    log_scale: Tensor | None,
    source: LearnedFeatures | TokenFeatures,
    state: FeaturelessWindowState,
) -> tuple[Tensor, FeaturelessWindowState]:
    """(o ``[b 1 h v]`` in float32, the state behind the token) of streams and a state that fit each
    other.
    """
    keys, values, memory, age = (
        s.contiguous() for s in (_single(state[0]), _single(state[1]), *state[2:])
    )
    # the cache grows until the window is full; then its oldest token goes into the memory
    (b, g, f, width), kept = memory.shape, rule.cache_length_after(age.shape[1])
    ring = torch.empty(b, g, kept, keys.shape[3]), torch.empty(b, g, kept, width - 1)
    written, after = empty(b, g, f, width), torch.empty(b, kept, dtype=torch.long)
    streams, before = (q, k, v, mix, log_scale), (keys, values, memory, age)
    o = _call(rule, streams, source, before, (*ring, written, after))
    cache = _in_dtype_of(ring[0], state[0], k), _in_dtype_of(ring[1], state[1], v)
    return o, (*cache, written, after)


def _call(
    rule: WindowRule,
    streams: tuple[Tensor | None, ...],
    source: LearnedFeatures | TokenFeatures,
    before: FeaturelessWindowState,
    after: FeaturelessWindowState,
    pages: abi.Pages = abi.IN_A_ROW,
) -> Tensor:
    """o ``[b 1 h v]`` in float32 of (q, k, v, mix, log_scale); the state behind is `after` then."""
    q, k, v, mix, scale = (None if s is None else _single(s) for s in streams)
    assert q is not None
    (keys, values, memory, age), (b, _, h, width) = before, q.shape
    _, g, f, columns = memory.shape
    o = torch.empty(b, 1, h, columns - 1)
    sizes = (b, h, g, width, columns - 1, f, rule.window, age.shape[1], rule.shared, FORGOTTEN)
    constants = (rule.scale, rule.softcap or 0.0, library.threads(b * g * f * columns))
    places = {"keys": keys, "values": values, "age": age, "memory": memory}
    names = ("next_keys", "next_values", "next_memory", "next_age")
    results = {"o": o, **dict(zip(names, after, strict=True))}
    step = abi.WindowStep(
        *sizes, *constants, q, k, v, mix, scale, **places, **results, **source.fields()
    )
    library.call(CODE, step._replace(pages=pages))
    return o


def _in_dtype_of(cache: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """float32 numbers in the dtype that old and new tokens have together."""
    if old.dtype == new.dtype == torch.float32:
        return cache
    return cache.to(torch.promote_types(old.dtype, new.dtype))


def _single(stream: Tensor) -> Tensor:
    return stream if stream.dtype == torch.float32 else stream.float()


def _run(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    keys, values, kept, memory, age = state
    if torch.is_grad_enabled() and _requires_grad(recurrence, state):
        return recurrence.step(state)
    rule = WindowRule.of(recurrence)
    given = learned_features(recurrence) or _given_features(recurrence, rule, keys, kept)
    before, (q, k, v, mix, scale) = (keys, values, memory, age), _streams(recurrence, given)
    o, (keys, values, memory, age) = window_step(rule, q, k, v, mix, scale, given, before)
    if isinstance(given, TokenFeatures):
        kept = recurrence.kept_features(given.following.to(kept.dtype))
    else:
        kept = keys[..., :0]
    return o.to(recurrence.output), (keys, values, kept, memory, age)


def _streams(
    recurrence: WindowedLinear, given: LearnedFeatures | TokenFeatures
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(q, k, v, mix, a)"""
    q = recurrence.q.expand(*recurrence.shape, -1)  # of the others C repeats axes of length 1
    scale = _scale_beside(recurrence, given)
    return q, recurrence.k, recurrence.v, recurrence.mix, scale


def _run_in_pages(record: InPages) -> Tensor:
    recurrence: Any = record.recurrence
    keys, values, _, memory, age = record.state
    rule, given = WindowRule.of(recurrence), learned_features(recurrence)
    assert given is not None
    state, pages = (keys, values, memory, age), abi.Pages(record.pages, record.step)
    o = _call(rule, _streams(recurrence, given), given, state, state, pages)
    return o.to(recurrence.output)


def _refuses_in_pages(record: InPages) -> str | None:
    recurrence, state = record.recurrence, record.state
    if not isinstance(recurrence, WindowedLinear):
        return "its rule is another"
    refusal = _refuses(recurrence)
    if refusal or learned_features(recurrence) is None:
        return refusal or "its features are none that C makes"
    if any(part.dtype != torch.float32 for part in (*state[:2], state[3])):
        return "its states are not of float32"
    if state[4].shape[1] != max(recurrence.window - 1, 0):
        return "its pages have no room for the window"
    return record.scattered()


def _scale_beside(
    recurrence: WindowedLinear, given: LearnedFeatures | TokenFeatures
) -> Tensor | None:
    """a, made now if C does not make it with the features."""
    made = isinstance(given, LearnedFeatures) and given.f is abi.FeatureMap.LANDMARKS
    return None if made or recurrence.log_scale is None else features(recurrence.log_scale)


def _requires_grad(recurrence: WindowedLinear, state: WindowState) -> bool:
    maps = [s.map for s in (recurrence.fq, recurrence.fk) if isinstance(s, Mapped)]
    own = (*(phi.W for phi in maps), *(phi.b for phi in maps if isinstance(phi, ScaledMap)))
    return any(s.requires_grad for s in (*recurrence.streams.values(), *own, *state))


def _given_features(
    recurrence: WindowedLinear, rule: WindowRule, keys: Tensor, kept: Tensor
) -> TokenFeatures:
    """The token's and the cache's features, made by torch if nobody has."""
    (b, t, h), g = recurrence.shape, recurrence.groups
    fq, fk = features(recurrence.fq).expand(b, t, h, -1), features(recurrence.fk)
    cached = _single(recurrence.cached_features(keys, kept)).contiguous()
    following = torch.empty(b, g, rule.cache_length_after(keys.shape[2]), fk.shape[-1])
    return TokenFeatures(_single(fq), _single(fk.expand(b, t, g, -1)), cached, following)


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
NATIVE_WINDOW_IN_PAGES = Kernel(
    "window and linear memory in pages, one token (compiled)",
    InPages,
    _run_in_pages,
    _refuses_in_pages,
    CPU,
)
