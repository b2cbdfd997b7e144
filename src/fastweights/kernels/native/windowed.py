"""`WindowedLinear` through the compiled extension: one token by windowed.c, many by prefill.c."""

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
from fastweights.kernels.windowed.forward import blockwise_windows
from fastweights.recurrence.mapped import LogScale, Mapped, elu_plus_one, features, softmax
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import WindowedLinear, WindowState

ONE_TOKEN, MANY_TOKENS = "fw_window_step", "fw_window_prefill"

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

    def cache_length_after(self, cached: int, tokens: int) -> int:
        """How many tokens are cached after so many more."""
        return min(max(self.window - 1, 0), cached + tokens)


class FeatureWeights(NamedTuple):
    """Features that C makes of q and of keys that leave the window: f, and W ``[h·f/2 k]``; of
    landmarks W ``[h·f k]`` and b ``[h·f]``, from which it has the log scale, too, and, of a token
    at a position, how its channels turn ``[h 2 k]``, and how many of the last landmarks read these
    as they are.
    """

    f: abi.FeatureKind
    W_q: Tensor
    W_k: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    turning: Tensor | None = None
    position: int = 0
    further: int = 0

    def fields(self) -> dict[str, Any]:
        """Those of ``WindowProblem`` that say where features come from."""
        fields = self._asdict()
        return {"map": fields.pop("f"), **fields}

    def by_head(self, count: int) -> list[FeatureWeights]:
        """Those of each of so many key heads and its queries."""
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}
        each = zip(*(x.chunk(count) for x in tensors.values()), strict=True)
        return [self._replace(**dict(zip(tensors, own, strict=True))) for own in each]


ACTIVATIONS = {
    softmax: abi.FeatureKind.SOFTMAX,
    torch.exp: abi.FeatureKind.EXP,
    elu_plus_one: abi.FeatureKind.ELU,
    F.relu: abi.FeatureKind.RELU,
}
"""The f of `Mapped` features that C knows."""


def learned_features(recurrence: WindowedLinear) -> FeatureWeights | None:
    """What C makes the features of this record with; None where it cannot, as they are there, or
    of other streams than q and k, or by a map that it does not know.
    """
    fq, fk = recurrence.fq, recurrence.fk
    if not (isinstance(fq, Mapped) and isinstance(fk, Mapped)):
        return None
    same = fq.stream is recurrence.q and fk.stream is recurrence.k
    if fk.map.activate is not fq.map.activate or not same:
        return None
    if fq.position is not None and (len(recurrence) > 1 or recurrence.keep_mask is not None):
        return None
    f, *parameters = _function(recurrence, fq.map, fk.map)
    if f is None or library.refuse_tensors(*parameters):
        return None
    if not all(p.is_contiguous() for p in parameters):
        return None
    return FeatureWeights(f, *parameters)._replace(**_turning(fq, fk.map))


def _turning(fq: Mapped, phi_k: Any) -> dict[str, Any]:
    """What is read as it was before rotary positions, of a token at a position."""
    if fq.position is None:
        return {}
    return {"turning": phi_k.turning, "position": fq.position, "further": phi_k.further}


def _function(recurrence: WindowedLinear, phi_q: Any, phi_k: Any) -> tuple[Any, ...]:
    """f, None if C does not know it, and the parameters of both maps."""
    W, scale = (phi_q.W, phi_k.W), recurrence.log_scale
    if not isinstance(scale, LogScale):
        return ACTIVATIONS.get(phi_q.activate), *W
    own = scale.map is phi_q and scale.stream is recurrence.q
    return abi.FeatureKind.LANDMARKS if own else None, *W, phi_q.b, phi_k.b


class TokenFeatures(NamedTuple):
    """Features of the tokens ``[b t h f]``, ``[b t g f]``, those of the cache ``[b g s f]``, and
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


class WindowStreams(NamedTuple):
    """q ``[b t h k]``, k ``[b t g k]``, v ``[b t g v]``, γ and perhaps a ``[b t h 1]``, which
    tokens are no padding and which begin a document ``[b t]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mix: Tensor
    log_scale: Tensor | None = None
    keep: Tensor | None = None
    starts: Tensor | None = None

    @classmethod
    def of(
        cls, recurrence: WindowedLinear, source: FeatureWeights | TokenFeatures
    ) -> WindowStreams:
        b, t, h = recurrence.shape
        q = recurrence.q.expand(b, t, h, -1)  # of the others C repeats axes of length 1
        scale = _scale_beside(recurrence, source)
        masks = (
            None if mask is None else mask[..., 0, 0].expand(b, t).contiguous()
            for mask in (recurrence.keep_mask, recurrence.segment_starts)
        )
        return cls(
            _readable(q),
            _readable(recurrence.k),
            _readable(recurrence.v),
            _readable(recurrence.mix),
            None if scale is None else _readable(scale),
            *masks,
        )


def read_tokens(
    rule: WindowRule,
    streams: WindowStreams,
    source: FeatureWeights | TokenFeatures,
    state: FeaturelessWindowState,
    output: torch.dtype = torch.float32,
) -> tuple[Tensor, FeaturelessWindowState]:
    """(o ``[b t h v]`` in the dtype `output`, if C has it, else in float32; the state behind the
    tokens) of streams and a state that fit each other.
    """
    keys, values, memory, age = (
        s.contiguous() for s in (_single(state[0]), _single(state[1]), *state[2:])
    )
    (b, g, f, width), t = memory.shape, streams.q.shape[1]
    kept = rule.cache_length_after(age.shape[1], t)
    ring = torch.empty(b, g, kept, keys.shape[3]), torch.empty(b, g, kept, width - 1)
    written, after = empty(b, g, f, width), torch.empty(b, kept, dtype=torch.long)
    o = _call(rule, streams, source, (keys, values, memory, age), (*ring, written, after), output)
    cache = (
        _in_dtype_of(own, old, new)
        for own, old, new in zip(ring, state[:2], streams[1:3], strict=True)
    )
    return o, (*cache, written, after)  # type: ignore[return-value]


def _call(
    rule: WindowRule,
    streams: WindowStreams,
    source: FeatureWeights | TokenFeatures,
    before: FeaturelessWindowState | None,
    after: FeaturelessWindowState,
    output: torch.dtype,
    pages: abi.Pages = abi.IN_A_ROW,
) -> Tensor:
    """o ``[b t h v]``; the state behind is `after` then. `before` is None for the empty one, behind
    which `after` has room for a whole window.
    """
    (b, t, h, width), (_, g, f, columns) = streams.q.shape, after[2].shape
    cached = (after if before is None else before)[3].shape[1]
    o = empty(b, t, h, columns - 1, dtype=output if output in library.NARROW else torch.float32)
    sizes = (b, t, h, g, width, columns - 1, f, rule.window, cached, rule.shared, FORGOTTEN)
    constants = (rule.scale, rule.softcap or 0.0, library.threads(b * t * g * f * columns))
    parts = ("keys", "values", "memory", "age")
    places = dict(zip(parts, before or (None,) * 4, strict=True))
    results = {f"next_{name}": part for name, part in zip(parts, after, strict=True)}
    tensors: dict[str, Any] = {**places, **results, **source.fields(), "o": o, "pages": pages}
    plain = streams.keep is None and streams.starts is None
    one = t == 1 and plain and before is not None
    problem = abi.WindowProblem(*sizes, *constants, *streams, **tensors)
    library.call(ONE_TOKEN if one else MANY_TOKENS, problem)
    return o


def _in_dtype_of(cache: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """float32 numbers in the dtype that old and new tokens have together."""
    if old.dtype == new.dtype == torch.float32:
        return cache
    return cache.to(torch.promote_types(old.dtype, new.dtype))


def _single(stream: Tensor) -> Tensor:
    return stream if stream.dtype == torch.float32 else stream.float()


def _readable(stream: Tensor) -> Tensor:
    return stream if stream.dtype in library.NARROW else stream.float()


def _run(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    keys, values, kept, memory, age = state
    if torch.is_grad_enabled() and any(s.requires_grad for s in state):
        return _run_with_gradients(recurrence, state)
    source = learned_features(recurrence) or _given_features(recurrence, keys, kept)
    streams, before = WindowStreams.of(recurrence, source), (keys, values, memory, age)
    o, (keys, values, memory, age) = read_tokens(
        WindowRule.of(recurrence), streams, source, before, recurrence.output
    )
    if isinstance(source, TokenFeatures):
        dtype = torch.promote_types(kept.dtype, source.fk.dtype)
        kept = recurrence.kept_features(source.following.to(dtype))
    else:
        kept = keys[..., :0]
    return o.to(recurrence.output), (keys, values, kept, memory, age)


def _run_with_gradients(
    recurrence: WindowedLinear, state: WindowState
) -> tuple[Tensor, WindowState]:
    return recurrence.step(state) if len(recurrence) == 1 else blockwise_windows(recurrence, state)


def _run_in_pages(record: InPages) -> Tensor:
    recurrence: Any = record.recurrence
    keys, values, _, memory, age = record.state
    source = learned_features(recurrence)
    assert source is not None
    state, pages = (keys, values, memory, age), abi.Pages(record.pages, record.step)
    rule, streams = WindowRule.of(recurrence), WindowStreams.of(recurrence, source)
    before = None if record.begins else state
    o = _call(rule, streams, source, before, state, recurrence.output, pages)
    return o.to(recurrence.output)


def _refuses_in_pages(record: InPages) -> str | None:
    recurrence, state = record.recurrence, record.state
    if not isinstance(recurrence, WindowedLinear):
        return "its rule is another"
    if recurrence.segment_starts is not None:
        return "documents may begin in it"
    refusal = _refuses_tokens(recurrence)
    if refusal or learned_features(recurrence) is None:
        return refusal or "its features are none that C makes"
    if any(part.dtype != torch.float32 for part in (*state[:2], state[3])):
        return "its states are not of float32"
    if state[4].shape[1] != max(recurrence.window - 1, 0):
        return "its pages have no room for the window"
    return record.scattered()


def _scale_beside(
    recurrence: WindowedLinear, given: FeatureWeights | TokenFeatures
) -> Tensor | None:
    """a, made now if C does not make it with the features."""
    made = isinstance(given, FeatureWeights) and given.f is abi.FeatureKind.LANDMARKS
    return None if made or recurrence.log_scale is None else features(recurrence.log_scale)


def _given_features(recurrence: WindowedLinear, keys: Tensor, kept: Tensor) -> TokenFeatures:
    """The tokens' and the cache's features, made by torch if nobody has."""
    (b, t, h), g = recurrence.shape, recurrence.groups
    fq, fk = features(recurrence.fq).expand(b, t, h, -1), features(recurrence.fk)
    cached = _single(recurrence.cached_features(keys, kept)).contiguous()
    length = WindowRule.of(recurrence).cache_length_after(keys.shape[2], t)
    following = torch.empty(b, g, length, fk.shape[-1])
    return TokenFeatures(_readable(fq), _readable(fk.expand(b, t, g, -1)), cached, following)


def _refuses_one(recurrence: WindowedLinear) -> str | None:
    if len(recurrence) != 1:
        return f"it has {len(recurrence)} tokens, not one"
    if recurrence.keep_mask is not None or recurrence.segment_starts is not None:
        return "its token may be padding or begin a document"
    return _refuses_tokens(recurrence)


def _refuses_tokens(recurrence: WindowedLinear) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes kernels of torch's own operations"
    if torch.is_grad_enabled() and _requires_grad(recurrence):
        return "autograd follows it"
    return refuses(recurrence)


def _requires_grad(recurrence: WindowedLinear) -> bool:
    lazy = (recurrence.fq, recurrence.fk, recurrence.log_scale)
    read = (*recurrence.streams.values(), *lazy)
    return any(s is not None and s.requires_grad for s in read)


NATIVE_WINDOW = Kernel(
    "window and linear memory, one token (compiled)", WindowedLinear, _run, _refuses_one, CPU, True
)
NATIVE_WINDOWS = Kernel(
    "windows and linear memory, block by block (compiled)",
    WindowedLinear,
    _run,
    _refuses_tokens,
    CPU,
    opaque=True,
)
NATIVE_WINDOW_IN_PAGES = Kernel(
    "window and linear memory in pages (compiled)",
    InPages,
    _run_in_pages,
    _refuses_in_pages,
    CPU,
    opaque=True,
)
