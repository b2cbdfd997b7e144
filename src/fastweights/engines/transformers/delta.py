"""The gated delta rule and Kimi's, whose decay has a number per channel: one `Delta`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.engines.transformers.documents import evaluate_rows
from fastweights.engines.transformers.substitute import Call, Substitute
from fastweights.layers import upcast
from fastweights.ops import rms_normalize
from fastweights.recurrence import Delta

PACKAGE = "fla"
FLOOR = 1e-6
"""Of the norms of q and k: x / √(|x|² + 10⁻⁶)."""


def evaluate_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(o ``[b t h v]``, the state ``[b h k v]`` or None) of q and k ``[b t h' k]``, each for h / h'
    heads of v, the log decay g ``[b t h]`` or ``[b t h k]`` and β ``[b t h]``.
    """
    del chunk_size
    q, k, v, log_decay, strength = (upcast(s) for s in (query, key, value, g, beta))
    scale = q.shape[-1] ** -0.5
    q, k = (_unit(q, scale), _unit(k, 1.0)) if use_qk_l2norm_in_kernel else (q * scale, k)
    served = v.shape[2] // k.shape[2]
    if served > 1:
        q, k = q.repeat_interleave(served, dim=2), k.repeat_interleave(served, dim=2)
    log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None]
    record = Delta(q, k, v, strength[..., None], log_decay)
    o, state = evaluate_rows(record, kwargs, initial_state)
    return o.to(query.dtype), state if output_final_state else None


def _unit(x: Tensor, scale: float) -> Tensor:
    """x · scale / √(|x|² + `FLOOR`), which is an RMSNorm with one weight for all channels."""
    d = x.shape[-1]
    return rms_normalize(x, x.new_full((d,), scale * d**-0.5), FLOOR / d)


def _calls(per_channel: bool) -> Iterator[Call]:
    several = ((70, 1, False), (5, 1, True))
    grouped = () if per_channel else ((70, 2, False), (5, 2, True))
    for tokens, served, state in ((1, 1, True), *several, *grouped):
        b, h, k, v = 2, 2, 8, 6
        q, key = torch.randn(2, b, tokens, h, k)
        width = (k,) if per_channel else ()
        g = F.logsigmoid(torch.randn(b, tokens, h * served, *width))
        yield Call(
            (q, key, torch.randn(b, tokens, h * served, v)),
            {
                "g": g,
                "beta": torch.rand(b, tokens, h * served),
                "initial_state": torch.randn(b, h * served, k, v) if state else None,
                "output_final_state": state,
                "use_qk_l2norm_in_kernel": tokens > 1,
            },
            may_fail=served > 1,  # before transformers 5.21, layers repeat keys themselves
        )


DELTA_RULES = tuple(
    Substitute(name, evaluate_delta, partial(_calls, per_channel), PACKAGE)
    for name, per_channel in (
        ("torch_chunk_gated_delta_rule", False),
        ("torch_recurrent_gated_delta_rule", False),
        ("chunk_kimi_delta_attention", True),
        ("recurrent_kimi_delta_attention", True),
    )
)
