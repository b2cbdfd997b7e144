"""The short causal convolution of every channel by itself: entries of the kernel table for Triton
and C, one for a single token, and one for torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty
from fastweights.kernels.table import Kernel, select
from fastweights.kernels.triton import convolution as triton
from fastweights.kernels.triton.launch import DEVICES
from fastweights.kernels.triton.operator import Streams, TritonOperator
from fastweights.recurrence.derivatives import differentiable_by


class Convolution(NamedTuple):
    """The short causal convolution of every channel by itself.

    y_t = Σ_j taps_j ⊙ x_{t-n+j} + bias, or SiLU of that

    The result is ``[b t d]``; the n inputs before the first are the tail.

    Attributes:
        tail: ``[b n d]``
        x: ``[b t d]``
        taps: ``[n+1 d]``, that of the token itself last
        document: ``[b n+t]`` or None: only inputs of a token's own document count
        bias: ``[d]``; None: 0
        silu: whether SiLU follows
    """

    tail: Tensor
    x: Tensor
    taps: Tensor
    document: Tensor | None = None
    bias: Tensor | None = None
    silu: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the convolution itself here."""
        return torch.is_grad_enabled() and any(s.requires_grad for s in self[:3])

    def finish(self, y: Tensor) -> Tensor:
        """The result, from the sums over the taps."""
        y = y if self.bias is None else y + self.bias
        return F.silu(y) if self.silu else y


def convolve(
    tail: Tensor,
    x: Tensor,
    taps: Tensor,
    document: Tensor | None = None,
    bias: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """A `Convolution` by the first kernel that takes it: (y ``[b t d]``, the next tail)."""
    convolution = Convolution(tail, x, taps, document, bias, silu)
    return select(convolution).compute(convolution)


def next_tail(convolution: Convolution) -> Tensor:
    """The last n inputs ``[b n d]``, zeros where they are of another document than the last one."""
    tail, x, _, document = convolution[:4]
    n, t = tail.shape[1], x.shape[1]
    seen = torch.cat([tail, x[:, max(t - n, 0) :]], dim=1)
    last = seen[:, seen.shape[1] - n :]
    if document is None:
        return last
    return last * (document[:, t:] == document[:, -1:])[..., None]


def convolve_token(convolution: Convolution) -> tuple[Tensor, Tensor]:
    """All taps of a single token at once."""
    tail, x, taps = convolution[:3]
    seen = torch.cat([tail, x], dim=1)
    return convolution.finish((seen * taps).sum(1, keepdim=True)), seen[:, 1:]


def _refuses_tokens(convolution: Convolution) -> str | None:
    if convolution.x.shape[1] != 1:
        return "it has several tokens"  # with their number, a graph would be of that number alone
    return None if convolution.document is None else "its token may begin a document"


def convolve_by_taps(convolution: Convolution) -> tuple[Tensor, Tensor]:
    """All tokens, tap by tap."""
    return convolution.finish(_sum_taps(*convolution[:4])), next_tail(convolution)


def _sum_taps(tail: Tensor, x: Tensor, taps: Tensor, document: Tensor | None) -> Tensor:
    seen, t, last = torch.cat([tail, x], dim=1), x.shape[1], len(taps) - 1
    y = seen[:, last:] * taps[last]
    for tap in range(last):
        x = seen[:, tap : tap + t]
        if document is not None:
            x = x * (document[:, tap : tap + t] == document[:, last:])[..., None]
        y = torch.addcmul(y, x, taps[tap])
    return y


def convolve_by_triton(convolution: Convolution) -> tuple[Tensor, Tensor]:
    """All tokens by kernels/triton."""
    streams, silu = convolution[:-1], convolution.silu
    if triton.is_token_alone(streams):
        return triton.convolve_token(silu, streams)
    y, following = TRITON_CONVOLUTION(triton.ConvolutionSettings(silu), *streams)
    return y, following


def _define(settings: triton.ConvolutionSettings, streams: Streams) -> tuple[Tensor, Tensor]:
    return convolve_by_taps(Convolution(*streams, silu=settings.silu))  # type: ignore[arg-type]


TRITON_CONVOLUTION = TritonOperator(
    "convolution",
    triton.ConvolutionSettings,
    ("tail", "x", "taps", "document", "bias"),
    2,
    triton.forward,
    triton.backward,
    _define,
)


def _refuses_triton(convolution: Convolution) -> str | None:
    tail, x, taps, _, bias, _ = convolution
    return triton.refuses(tail, x, taps, bias)


def convolve_natively(convolution: Convolution) -> tuple[Tensor, Tensor]:
    """All tokens by convolution.c."""
    given = _side_by_side(*convolution[:4])
    y: Any = _ConvolutionFunction.apply(*given[:4]) if given.requires_grad else _forward(given)
    return convolution.finish(y), next_tail(convolution)


def _refuses_native(convolution: Convolution) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    if convolution.x.numel() == 0:
        return "it is empty"
    refusal = library.refuse_tensors(*convolution[:3], dtypes=library.NARROW)
    if refusal is None and len(convolution.taps) > library.read_constant("fw_most_taps"):
        return f"it has {len(convolution.taps)} taps, more than C takes"
    return refusal


def _side_by_side(
    tail: Tensor, x: Tensor, taps: Tensor, document: Tensor | None = None
) -> Convolution:
    """The same with channels side by side in memory, tail and x of one dtype, and documents of
    64 bits, as C reads them.
    """
    tail, x = (s.to(torch.promote_types(tail.dtype, x.dtype)) for s in (tail, x))
    tail, x = (s if s.stride(-1) == 1 else s.contiguous() for s in (tail, x))
    return Convolution(
        tail, x, taps.contiguous(), None if document is None else document.long().contiguous()
    )


def _problem(convolution: Convolution) -> abi.ConvolutionCall:
    """Sizes and inputs, without results."""
    (b, t, d), taps = convolution.x.shape, len(convolution.taps)
    return abi.ConvolutionCall(
        b,
        t,
        d,
        taps,
        library.threads(convolution.x.numel() * taps),
        document=convolution.document,
        weight=convolution.taps.float(),
        d_weight=None,
        tail=convolution.tail.unsqueeze(2),
        x=convolution.x.unsqueeze(2),
    )


def _forward(convolution: Convolution) -> Tensor:
    y = empty(
        *convolution.x.shape,
        dtype=torch.promote_types(convolution.x.dtype, convolution.taps.dtype),
    )
    library.call("fw_convolve", _problem(convolution)._replace(y=y.unsqueeze(2)))
    return y


class _ConvolutionFunction(torch.autograd.Function):
    """y of the tail, x, the taps and the document.

    With y_t = Σ_j taps_j ⊙ x_{t-n+j}, each tap gives its input dx_{t-n+j} += taps_j ⊙ dy_t and has
    the gradient dtaps_j = Σ_t dy_t ⊙ x_{t-n+j}: `fw_convolve_back` finds both in one pass.
    """

    @staticmethod
    def forward(ctx: Any, *streams: Any) -> Tensor:
        ctx.save_for_backward(*streams)
        return _forward(Convolution(*streams))

    @staticmethod
    @differentiable_by(lambda ctx: (_sum_taps, ctx.saved_tensors))
    def backward(ctx: Any, *gradients: Any) -> Any:
        convolution, (d_y,) = Convolution(*ctx.saved_tensors), gradients
        tail, x, taps = convolution[:3]
        d_y = d_y if d_y.stride(-1) == 1 else d_y.contiguous()
        d_tail, d_x = torch.empty_like(tail), empty(*x.shape, dtype=x.dtype)
        # Sequences add to the taps' gradient at once, so each has room of its own; then their sum.
        d_taps = torch.empty(len(x), *taps.shape)
        streams = {"d_tail": d_tail, "d_x": d_x, "d_y": d_y}
        views: dict[str, Any] = {name: s.unsqueeze(2) for name, s in streams.items()}
        library.call("fw_convolve_back", _problem(convolution)._replace(d_weight=d_taps, **views))
        return d_tail, d_x, d_taps.sum(0).to(taps.dtype), None


CONVOLUTION_KERNELS = [
    Kernel(
        "short convolution (Triton)",
        Convolution,
        convolve_by_triton,
        _refuses_triton,
        DEVICES,
        True,
    ),
    Kernel("short convolution, one token (torch)", Convolution, convolve_token, _refuses_tokens),
    Kernel(
        "short convolution (compiled)",
        Convolution,
        convolve_natively,
        _refuses_native,
        ("cpu",),
        opaque=True,
    ),
    Kernel("short convolution (torch)", Convolution, convolve_by_taps),
]
