"""Other libraries' functions on our inputs. Each is imported when it is wanted; what is missing
says so.

Peers scale the query by d_k^(-1/2); where they offer no switch our queries are scaled back before
the call, so that the outputs agree.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.external.flash_linear_attention import is_mistranslated
from fastweights.lab.bench.contenders import Implementation, Inputs, TensorFunction

TRANSFORMERS, FLA, MAMBA, TORCH = "transformers", "flash-linear-attention", "mamba", "torch"
FLASH_QLA = "FlashQLA"


def _import_function(module: str, name: str) -> Callable[..., Any]:
    """The function itself: transformers' decorators would put other libraries' kernels in its
    place.
    """
    return unwrap(getattr(import_module(module), name))


def _peer(
    name: str,
    library: str,
    path: str,
    use: Callable[[Callable[..., Any], Inputs], Tensor],
    **facts: Any,
) -> Implementation:
    """The function at ``module:name``, called by `use`."""
    module, _, attribute = path.partition(":")

    def load() -> TensorFunction:
        function = _import_function(module, attribute)
        return lambda inputs: use(function, inputs)

    return Implementation(name, library, load, **facts)


def _undo_scale(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** 0.5


def _log_decay(x: Inputs) -> Tensor:
    """``[b t h]``: that of the inputs, or none."""
    return x["log_decay"][..., 0] if "log_decay" in x else torch.zeros_like(x["v"][..., 0])


def _sdpa(x: Inputs) -> Tensor:
    q, k, v = (x[n].transpose(1, 2) for n in ("q", "k", "v"))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


SDPA = Implementation(
    "SDPA", TORCH, lambda: _sdpa, exact=False, note="causal softmax attention on the same q, k, v"
)


SOFTMAX = Implementation("SDPA", TORCH, lambda: _sdpa)


def softmax_in_band(window: int) -> Implementation:
    """Return PyTorch's softmax attention within a window, by a mask."""

    def run(x: Inputs) -> Tensor:
        q, k, v = (x[n].transpose(1, 2) for n in ("q", "k", "v"))
        t = q.shape[2]
        mask = torch.ones(t, t, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    return Implementation("SDPA with a band mask", TORCH, lambda: run)


def _mamba2(function: Callable[..., Any], x: Inputs) -> Tensor:
    dt = -_log_decay(x)
    a = -torch.ones(dt.shape[-1], device=dt.device)
    return function(x["v"] / dt[..., None], dt, a, x["k"], x["q"], chunk_size=64)


def _xlstm(function: Callable[..., Any], x: Inputs) -> Tensor:
    q, k, v = (x[n].transpose(1, 2).contiguous() for n in ("q", "k", "v"))
    forget = _log_decay(x).transpose(1, 2).contiguous()
    return function(q, k, v, igate=torch.zeros_like(forget), fgate=forget).transpose(1, 2)


DECAY_SCALAR = (
    _peer(
        "Mamba-2 chunk scan",
        TRANSFORMERS,
        "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan",
        _mamba2,
    ),
    _peer(
        "xLSTM native autograd",
        TRANSFORMERS,
        "transformers.models.xlstm.modeling_xlstm:mlstm_chunkwise_native_autograd",
        _xlstm,
        exact=False,
        note="mLSTM: input gate and normaliser too",
    ),
    _peer(
        "naive chunk",
        FLA,
        "fla.ops.simple_gla.naive:naive_chunk_simple_gla",
        lambda f, x: f(x["q"], x["k"], x["v"], _log_decay(x), scale=1.0)[0],
    ),
    SDPA,
)
DECAY_NONE = (*DECAY_SCALAR[1:],)


def _naive_gla(function: Callable[..., Any], x: Inputs) -> Tensor:
    """With keys of the queries' dtype where they are tied: kernels cannot multiply float32 by
    bfloat16.
    """
    return function(_undo_scale(x["q"]), _keys(x), x["v"], x["log_decay"])[0]


def _keys(x: Inputs) -> Tensor:
    return x["k"] if "k" in x else -torch.expm1(x["log_decay"]).to(x["q"].dtype)


DECAY_TIED = (_peer("naive recurrent", FLA, "fla.ops.gla.naive:naive_recurrent_gla", _naive_gla),)
DECAY_VECTOR = (*DECAY_TIED, SDPA)


def _delta_with_gate(function: Callable[..., Any], x: Inputs) -> Tensor:
    return function(_undo_scale(x["q"]), x["k"], x["v"], g=_log_decay(x), beta=x["beta"][..., 0])[0]


def _delta_rule(function: Callable[..., Any], x: Inputs) -> Tensor:
    q, k, v = (x[n].transpose(1, 2) for n in ("q", "k", "v"))
    return function(_undo_scale(q), k, v, x["beta"][..., 0].transpose(1, 2))[0].transpose(1, 2)


def _kda(function: Callable[..., Any], x: Inputs) -> Tensor:
    return function(_undo_scale(x["q"]), x["k"], x["v"], x["log_decay"], x["beta"][..., 0])[0]


DELTA_SCALAR = (
    _peer(
        "gated delta chunk",
        TRANSFORMERS,
        "transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule",
        _delta_with_gate,
    ),
    SDPA,
)
DELTA_NONE = (
    *DELTA_SCALAR,
    _peer("naive chunkwise", FLA, "fla.ops.delta_rule.naive:delta_rule_chunkwise", _delta_rule),
)
DELTA_VECTOR = (
    _peer(
        "KDA chunk",
        TRANSFORMERS,
        "transformers.models.kimi_linear.modeling_kimi_linear:chunk_kimi_delta_attention",
        _kda,
    ),
    _peer("naive chunk KDA", FLA, "fla.ops.kda.naive:naive_chunk_kda", _kda),
    SDPA,
)


def _mesa(function: Callable[..., Any], x: Inputs) -> Tensor:
    beta, ridge = x["beta"][..., 0], x["ridge"]
    return function(
        x["q"], x["k"], x["v"], _log_decay(x), ridge, beta, chunk_size=64, max_CG_iteration=30
    )[0]


MESA = (_peer("naive CG, 30 steps", FLA, "fla.ops.mesa_net.naive:naive_mesa_net_CG", _mesa), SDPA)


def _rglru(unit: Any, x: Inputs) -> Tensor:
    values, gate = x["v"][..., 0], x["log_decay"][..., 0].exp()
    never = torch.zeros_like(values, dtype=torch.bool)
    scanned, _ = unit._rnn_scan(SimpleNamespace(), values, gate, never, None)
    return scanned[..., None]


def _rwkv(function: Callable[..., Any], x: Inputs) -> Tensor:
    values = x["v"][..., 0]
    decay = torch.zeros(values.shape[-1], device=values.device)
    return function(decay, decay, x["log_decay"][..., 0], values)[0][..., None]


SCAN_REAL = (
    _peer(
        "RG-LRU scan",
        TRANSFORMERS,
        "transformers.models.recurrent_gemma.modeling_recurrent_gemma:RecurrentGemmaRglru",
        _rglru,
    ),
    _peer(
        "RWKV-4",
        TRANSFORMERS,
        "transformers.models.rwkv.modeling_rwkv:rwkv_linear_attention_cpu",
        _rwkv,
        exact=False,
        note="two scans under a running maximum, and their quotient",
    ),
)


def _selective(function: Callable[..., Any], x: Inputs) -> Tensor:
    u, dt, b, c = (x[n].mT for n in ("x", "delta", "B", "C"))
    return function(u, dt, x["A"], b, c).mT[..., None]


SELECTIVE = (
    _peer(
        "Mamba slow path",
        TRANSFORMERS,
        "transformers.models.mamba.modeling_mamba:mamba_selective_scan",
        _selective,
    ),
    _peer(
        "selective_scan_ref",
        MAMBA,
        "mamba_ssm.ops.selective_scan_interface:selective_scan_ref",
        _selective,
    ),
)


def _convolution(x: Inputs) -> Tensor:
    weight = x["weight"]
    taps, d = weight.shape
    padded = F.pad(x["x"].mT, (taps - 1, 0))
    return F.conv1d(padded, weight.mT[:, None], groups=d).mT


CONVOLUTION = (Implementation("conv1d", TORCH, lambda: _convolution),)


def rms_norm(eps: float) -> Implementation:
    """Return PyTorch's RMSNorm with this ε."""

    def run(x: Inputs) -> Tensor:
        return F.rms_norm(x["x"], x["x"].shape[-1:], x["weight"], eps)

    return Implementation("rms_norm", TORCH, lambda: run)


def is_miscompiled(contender: Implementation, device: torch.device) -> bool:
    """Whether a compiler makes this peer's backward wrong, as fla's own code says."""
    return device.type == "cuda" and contender.name in _MISCOMPILED and is_mistranslated(device)


def _allow_miscompiled() -> None:
    """Let fla's `chunk_bwd_dqkwg` run where it would refuse to, so that it can be timed."""
    module: Any = import_module("fla.ops.common.chunk_o")
    module.TRITON_ABOVE_3_7_1 = True


def _fla_scalar(function: Callable[..., Any], x: Inputs) -> Tensor:
    _allow_miscompiled()
    return function(x["q"], x["k"], x["v"], _log_decay(x), scale=1.0)[0]


def _fla_vector(function: Callable[..., Any], x: Inputs) -> Tensor:
    return function(x["q"], _keys(x), x["v"], x["log_decay"], scale=1.0)[0]


def _fla_delta(function: Callable[..., Any], x: Inputs, **gate: Tensor) -> Tensor:
    return function(x["q"], x["k"], x["v"], **gate, beta=x["beta"][..., 0], scale=1.0)[0]


def _fla_gated_delta(function: Callable[..., Any], x: Inputs) -> Tensor:
    _allow_miscompiled()
    return _fla_delta(function, x, g=_log_decay(x))


def _fla_kda(function: Callable[..., Any], x: Inputs) -> Tensor:
    return _fla_delta(function, x, g=x["log_decay"])


def mesa_in_steps(steps: int) -> Implementation:
    """Return flash-linear-attention's Mesa with so many steps of conjugate gradients."""

    def use(function: Callable[..., Any], x: Inputs) -> Tensor:
        beta, ridge = x["beta"][..., 0], x["ridge"]
        decay = _log_decay(x)
        return function(x["q"], x["k"], x["v"], decay, beta, ridge, max_CG_iteration=steps)[0]

    return _peer("chunk_mesa_net", FLA, "fla.ops.mesa_net:chunk_mesa_net", use)


def _fla_scan(function: Callable[..., Any], x: Inputs) -> Tensor:
    return function(x["v"][..., 0], x["log_decay"][..., 0])[0][..., None]


_MISCOMPILED = ("chunk_simple_gla", "chunk_gated_delta_rule")
TRITON_SCALAR = (
    _peer("chunk_simple_gla", FLA, "fla.ops.simple_gla:chunk_simple_gla", _fla_scalar),
)
TRITON_VECTOR = (_peer("chunk_gla", FLA, "fla.ops.gla:chunk_gla", _fla_vector),)
TRITON_TIED = (_peer("chunk_gla of 1 - α", FLA, "fla.ops.gla:chunk_gla", _fla_vector),)
TRITON_DELTA = (_peer("chunk_delta_rule", FLA, "fla.ops.delta_rule:chunk_delta_rule", _fla_delta),)
TRITON_GATED_DELTA = (
    _peer(
        "chunk_gated_delta_rule",
        FLA,
        "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
        _fla_gated_delta,
    ),
    _peer(
        "FlashQLA's chunk_gated_delta_rule",
        FLASH_QLA,
        "flash_qla:chunk_gated_delta_rule",
        _fla_gated_delta,
    ),
)
TRITON_KDA = (_peer("chunk_kda", FLA, "fla.ops.kda:chunk_kda", _fla_kda),)
TRITON_MESA = (mesa_in_steps(30),)
TRITON_SCAN = (_peer("chunk_hgrn", FLA, "fla.ops.hgrn:chunk_hgrn", _fla_scan),)
