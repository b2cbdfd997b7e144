"""Every recurrence that is benchmarked: how its streams are drawn, what it costs, and who else
computes it.

FLOPs are those of the chunkwise form with chunks of 64, a product of two numbers and its sum
counted as two: per token and head 4 d_k d_v + 2·64 (d_k + d_v) for `Decay`, 2.5 times that
backward. They make rates comparable between machines; a kernel that needs fewer shows a higher
fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels import only, takers
from fastweights.kernels.external import FASTER, SLOWER
from fastweights.lab.bench import peers
from fastweights.lab.bench.contenders import (
    Case,
    Draw,
    Implementation,
    Inputs,
    Phase,
    Sizes,
    TensorFunction,
)
from fastweights.layers import ShortConvolution, TokenContext, upcast
from fastweights.methods import Chunkwise, evaluate
from fastweights.ops import Convolution, RMSNorm, rms_normalize
from fastweights.recurrence import (
    Cholesky,
    ConjugateGradient,
    Decay,
    Delta,
    Mesa,
    Normalized,
    Recurrence,
    Selective,
    Softmax,
    Solver,
    WindowedLinear,
)

CHUNK = 64
WINDOW = 64
STEPS = 30
TAPS = 4
EPSILON = 1e-5
OURS = "fastweights"

Flops = Callable[[Sizes], float]


@dataclass(frozen=True)
class RecurrenceCase(Case):
    """A benchmark case: a recurrence built from random streams.

    Attributes:
        record: Builds the recurrence from the inputs.
        token_flops: FLOPs of the forward pass, per token and head.
        backward_flops: Of the backward pass; None for 2.5 times the forward's.
        peers: Other libraries' implementations for any device.
        gpu_peers: Other libraries' implementations that need CUDA, not in `implementations`.
        accuracy: Relative error that its solver tolerates.
        exact_solver: The solver of the reference, for a rule that has one.
    """

    name: str
    draws: dict[str, Draw]
    record: Callable[[Inputs], Recurrence]
    token_flops: Flops
    peers: tuple[Implementation, ...] = ()
    gpu_peers: tuple[Implementation, ...] = ()
    channels: bool = False
    state: int = 1
    accuracy: float = 0.0
    exact_solver: Solver | None = None
    backward_flops: Flops | None = None

    def implementations(self, inputs: Inputs) -> list[Implementation]:
        ours = [
            Implementation(kernel.name, OURS, partial(_ours, self.record, kernel.name))
            for kernel in takers(self.record(inputs))
            if kernel not in (*FASTER, *SLOWER)
        ]
        return [*ours, *self.peers]

    def reference(self, inputs: Inputs) -> Tensor:
        record: Any = self.record(inputs)
        if self.exact_solver is not None:
            record = replace(record, solver=self.exact_solver)
        return evaluate(record, method=Chunkwise(CHUNK))[0]

    def flops(self, sizes: Sizes, phase: Phase) -> float:
        forward = self.token_flops(sizes)
        backward = 2.5 * forward if self.backward_flops is None else self.backward_flops(sizes)
        return sizes.tokens * (forward if phase is Phase.FORWARD else forward + backward)


@dataclass(frozen=True)
class LayerCase(Case):
    """A benchmark case: a layer on ``x [b t h]`` of h channels, with weights ``[… h]``.

    Attributes:
        operation: Builds the record that the kernel table knows.
        ours: The layer.
        peers: Other libraries' implementations.
        exact: The layer once more, by other operations.
    """

    name: str
    draws: dict[str, Draw]
    operation: Callable[[Inputs], Any]
    ours: TensorFunction
    peers: tuple[Implementation, ...]
    exact: TensorFunction
    channels: bool = True
    state: int = 1

    def implementations(self, inputs: Inputs) -> list[Implementation]:
        kernel = takers(self.operation(inputs))[0]
        return [Implementation(kernel.name, OURS, lambda: self.ours), *self.peers]

    def reference(self, inputs: Inputs) -> Tensor:
        return self.exact(inputs)

    def flops(self, sizes: Sizes, phase: Phase) -> float:
        return 0.0


def _convolution(inputs: Inputs) -> Convolution:
    x, taps = inputs["x"], inputs["weight"]
    return Convolution(x.new_zeros(x.shape[0], len(taps) - 1, x.shape[2]), x, taps)


def _convolve(inputs: Inputs) -> Tensor:
    x, weight = inputs["x"], inputs["weight"]
    with torch.device(x.device):
        module = ShortConvolution(weight.shape[1], weight.shape[0])
    return torch.func.functional_call(module, {"weight": weight}, (x, TokenContext.start(x)))


def _convolve_by_unfolding(inputs: Inputs) -> Tensor:
    taps = inputs["weight"].shape[0]
    seen = F.pad(inputs["x"], (0, 0, taps - 1, 0)).unfold(1, taps, 1)
    return torch.einsum("btdj,jd->btd", seen, inputs["weight"])


def _norm(inputs: Inputs) -> RMSNorm:
    return RMSNorm(inputs["x"], inputs["weight"], EPSILON)


def _rms_norm(inputs: Inputs) -> Tensor:
    return rms_normalize(inputs["x"], inputs["weight"], EPSILON)


def _rms_norm_in_steps(inputs: Inputs) -> Tensor:
    x = inputs["x"]
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * inputs["weight"]


def _ours(record: Callable[[Inputs], Recurrence], kernel: str) -> TensorFunction:
    def run(inputs: Inputs) -> Tensor:
        with only(kernel):
            return evaluate(record(inputs))[0]

    return run


def _normal(s: Sizes, width: int, g: torch.Generator) -> Tensor:
    return torch.randn(s.b, s.t, s.h, width, generator=g)


def _queries(s: Sizes, g: torch.Generator) -> Tensor:
    return _normal(s, s.k, g) * s.k**-0.5


def _keys(s: Sizes, g: torch.Generator) -> Tensor:
    return _normal(s, s.k, g)


def _unit_keys(s: Sizes, g: torch.Generator) -> Tensor:
    return F.normalize(_keys(s, g), dim=-1)


def _positive(s: Sizes, g: torch.Generator) -> Tensor:
    return F.elu(_keys(s, g)) + 1


def _values(s: Sizes, g: torch.Generator) -> Tensor:
    return _normal(s, s.v, g)


def _beta(s: Sizes, g: torch.Generator) -> Tensor:
    return _normal(s, 1, g).sigmoid()


def _scalar_decay(s: Sizes, g: torch.Generator) -> Tensor:
    return F.logsigmoid(_normal(s, 1, g) + 2)


def _gentle(s: Sizes, g: torch.Generator) -> Tensor:
    """As trained: logsigmoid / 16, the gates of GLA and MetaLA."""
    return F.logsigmoid(_keys(s, g)) / 16


def _steep(s: Sizes, g: torch.Generator) -> Tensor:
    """A chunk of 16 decays by far more than float32 can hold."""
    return 20 * F.logsigmoid(_keys(s, g))


def _ridge(s: Sizes, g: torch.Generator) -> Tensor:
    return 0.25 + F.softplus(torch.randn(s.h, s.k, generator=g))


def _channel(s: Sizes, g: torch.Generator) -> Tensor:
    return torch.randn(s.b, s.t, s.h, generator=g)


def _taps(s: Sizes, g: torch.Generator) -> Tensor:
    return torch.randn(TAPS, s.h, generator=g)


def _scales(s: Sizes, g: torch.Generator) -> Tensor:
    return torch.randn(s.h, generator=g)


def _step_size(s: Sizes, g: torch.Generator) -> Tensor:
    return F.softplus(_channel(s, g) - 3)


def _phase(s: Sizes, g: torch.Generator) -> Tensor:
    return 3 * _keys(s, g)


def _rows(s: Sizes, g: torch.Generator) -> Tensor:
    return torch.randn(s.b, s.t, s.k, generator=g)


def _rates(s: Sizes, _: torch.Generator) -> Tensor:
    return -torch.arange(1.0, s.k + 1).expand(s.h, s.k).contiguous()


def _decay(x: Inputs) -> Decay:
    return Decay(x["q"], x.get("k"), x["v"], x.get("log_decay"))


def _delta(x: Inputs) -> Delta:
    return Delta(x["q"], x["k"], x["v"], x["beta"], x.get("log_decay"))


def _mesa(solver: ConjugateGradient, x: Inputs) -> Mesa:
    return Mesa(x["q"], x["k"], x["v"], x["beta"], x["log_decay"], x["ridge"], solver)


def _scan(x: Inputs) -> Decay:
    one = torch.ones_like(x["v"][:1, :1, :1]).expand_as(x["v"])
    return Decay(one, one, x["v"], x["log_decay"])


def _complex_scan(x: Inputs) -> Decay:
    q, k = (torch.complex(upcast(x[n]), torch.zeros_like(upcast(x[n]))) for n in ("q", "k"))
    return Decay(q, k, x["v"], torch.complex(x["log_decay"], x["phase"]))


def _selective(x: Inputs) -> Selective:
    """Discretisation included, as in the peers; the step goes to the values, so that all channels
    share B.
    """
    step = x["delta"][..., None]
    q, k, v = x["C"][:, :, None], x["B"][:, :, None], step * x["x"][..., None]
    return Selective(q, k, v, -step, -x["A"][None, None])


def _features(s: Sizes, g: torch.Generator) -> Tensor:
    return torch.cat(
        [torch.randn(s.b, s.t, s.h, s.k // 2, generator=g).softmax(-1) for _ in range(2)], -1
    )


def _scale(s: Sizes, g: torch.Generator) -> Tensor:
    """About the logarithm of what a query's scores weigh."""
    return 1 + torch.rand(s.b, s.t, s.h, 1, generator=g)


def _share(s: Sizes, g: torch.Generator) -> Tensor:
    return torch.rand(1, 1, s.h, 1, generator=g)


def _window_linear(x: Inputs) -> WindowedLinear:
    """A sequence that ends within the window has nothing linear to measure."""
    window = min(WINDOW, x["q"].shape[1] // 4)
    streams = (x["q"], x["k"], x["v"], x["fq"], x["fk"], x["mix"])
    return WindowedLinear(*streams, window, log_scale=x.get("scale"))


def _softmax(window: int | None, x: Inputs) -> Softmax:
    return Softmax(x["q"], x["k"], x["v"], window)


def _decay_flops(s: Sizes) -> float:
    return 4.0 * s.k * s.v + 2 * CHUNK * (s.k + s.v)


def _delta_flops(s: Sizes) -> float:
    return 6.0 * s.k * s.v + CHUNK * (5 * s.k + 5 * s.v + CHUNK)


def _solve_flops(s: Sizes) -> float:
    return STEPS * (2.0 * s.k * s.k + 4 * CHUNK * s.k)


def _mesa_flops(s: Sizes) -> float:
    return _solve_flops(s) + 2.0 * s.k * (s.k + s.v) + _decay_flops(s)


def _mesa_backward_flops(s: Sizes) -> float:
    """One more solve, and the gradients of what both states are made of."""
    return _solve_flops(s) + 10.0 * (s.k + CHUNK) * (s.k + s.v)


def _softmax_flops(s: Sizes) -> float:
    return float(s.t) * (s.k + s.v)


def _window_flops(s: Sizes) -> float:
    return 2.0 * WINDOW * (s.k + s.v)


def _no_flops(_: Sizes) -> float:
    return 0.0


_QKV: dict[str, Draw] = {"q": _queries, "k": _keys, "v": _values}
_RAW: dict[str, Draw] = {"q": _keys, "k": _keys, "v": _values}
_WINDOWED: dict[str, Draw] = {**_RAW, "fq": _features, "fk": _features, "mix": _share}
_IN_BAND = (
    replace(peers.softmax_in_band(WINDOW), exact=False, note="softmax in the window alone"),
    peers.SDPA,
)
_UNIT: dict[str, Draw] = {"q": _queries, "k": _unit_keys, "v": _values, "beta": _beta}
_MESA: dict[str, Draw] = {**_UNIT, "q": _unit_keys, "log_decay": _scalar_decay, "ridge": _ridge}


def find_case(name: str) -> RecurrenceCase | LayerCase:
    """Return the case of `CASES` with this name."""
    return next(case for case in CASES if case.name == name)


def mesa_case(solver: ConjugateGradient) -> RecurrenceCase:
    """Return the case of the Mesa rule on random streams, solved by `solver`."""
    return RecurrenceCase(
        "mesa", _MESA, partial(_mesa, solver), _mesa_flops, exact_solver=Cholesky()
    )


CASES: tuple[RecurrenceCase | LayerCase, ...] = (
    RecurrenceCase("decay none", _QKV, _decay, _decay_flops, peers.DECAY_NONE, peers.TRITON_SCALAR),
    RecurrenceCase(
        "decay scalar",
        {**_QKV, "log_decay": _scalar_decay},
        _decay,
        _decay_flops,
        peers.DECAY_SCALAR,
        peers.TRITON_SCALAR,
    ),
    RecurrenceCase(
        "decay vector gentle",
        {**_QKV, "log_decay": _gentle},
        _decay,
        _decay_flops,
        peers.DECAY_VECTOR,
        peers.TRITON_VECTOR,
    ),
    RecurrenceCase(
        "decay vector steep",
        {**_QKV, "log_decay": _steep},
        _decay,
        _decay_flops,
        peers.DECAY_VECTOR,
        peers.TRITON_VECTOR,
    ),
    RecurrenceCase(
        "decay tied",
        {"q": _queries, "v": _values, "log_decay": _gentle},
        _decay,
        _decay_flops,
        peers.DECAY_TIED,
        peers.TRITON_TIED,
    ),
    RecurrenceCase("delta none", _UNIT, _delta, _delta_flops, peers.DELTA_NONE, peers.TRITON_DELTA),
    RecurrenceCase(
        "delta scalar",
        {**_UNIT, "log_decay": _scalar_decay},
        _delta,
        _delta_flops,
        peers.DELTA_SCALAR,
        peers.TRITON_GATED_DELTA,
    ),
    RecurrenceCase(
        "delta vector",
        {**_UNIT, "log_decay": _gentle},
        _delta,
        _delta_flops,
        peers.DELTA_VECTOR,
        peers.TRITON_KDA,
    ),
    RecurrenceCase(
        "mesa 30 steps",
        _MESA,
        partial(_mesa, ConjugateGradient(STEPS)),
        _mesa_flops,
        peers.MESA,
        peers.TRITON_MESA,
        exact_solver=Cholesky(),
        backward_flops=_mesa_backward_flops,
    ),
    RecurrenceCase(
        "mesa tol 1e-5",
        _MESA,
        partial(_mesa, ConjugateGradient(STEPS, 1e-5)),
        _mesa_flops,
        peers.MESA,
        accuracy=1e-5,
        exact_solver=Cholesky(),
    ),
    RecurrenceCase(
        "normalized decay none",
        {"q": _positive, "k": _positive, "v": _values},
        lambda x: Normalized(_decay(x)),
        _decay_flops,
        (peers.SDPA,),
    ),
    RecurrenceCase(
        "scan real",
        {"v": _values, "log_decay": _scalar_decay},
        _scan,
        _no_flops,
        peers.SCAN_REAL,
        peers.TRITON_SCAN,
        channels=True,
    ),
    RecurrenceCase(
        "scan complex",
        {"q": _keys, "k": _keys, "v": _values, "log_decay": _gentle, "phase": _phase},
        _complex_scan,
        _no_flops,
        channels=True,
    ),
    RecurrenceCase(
        "selective scan",
        {"x": _channel, "delta": _step_size, "A": _rates, "B": _rows, "C": _rows},
        _selective,
        _no_flops,
        peers.SELECTIVE,
        channels=True,
        state=16,
    ),
    RecurrenceCase(
        "softmax window 64",
        _RAW,
        partial(_softmax, WINDOW),
        _window_flops,
        (peers.softmax_in_band(WINDOW),),
    ),
    RecurrenceCase(
        "windowed linear 64",
        _WINDOWED,
        _window_linear,
        lambda s: _window_flops(s) + _decay_flops(s),
        _IN_BAND,
    ),
    RecurrenceCase(
        "landmarks 64",
        {**_WINDOWED, "scale": _scale},
        _window_linear,
        lambda s: _window_flops(s) + _decay_flops(s),
        _IN_BAND,
    ),
    RecurrenceCase("softmax", _RAW, partial(_softmax, None), _softmax_flops, (peers.SOFTMAX,)),
    LayerCase(
        "short convolution",
        {"x": _channel, "weight": _taps},
        _convolution,
        _convolve,
        peers.CONVOLUTION,
        _convolve_by_unfolding,
    ),
    LayerCase(
        "RMSNorm",
        {"x": _channel, "weight": _scales},
        _norm,
        _rms_norm,
        (peers.rms_norm(EPSILON),),
        _rms_norm_in_steps,
    ),
)
