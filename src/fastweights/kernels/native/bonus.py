"""One token of a `Bonus` with exponential gates (RWKV-4), whose heads have one key: bonus.c."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastweights.kernels.native import abi, library
from fastweights.kernels.table import Kernel
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified
from fastweights.recurrence.scales import EMPTY_LOG_SCALE


def compute_token(
    recurrence: Amplified, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(o, state), without gradients."""
    rule, (memory, scale) = cast(Bonus, recurrence.inner.inner), state
    (b, _, h), v = recurrence.shape, recurrence.values
    memory, scale = memory.contiguous(), scale.contiguous()
    o, following = torch.empty(b, 1, h, v), (torch.empty_like(memory), torch.empty_like(scale))
    sizes = (b, h, v, library.threads(b * h * v), recurrence.initial_log_scale, EMPTY_LOG_SCALE)
    streams = (rule.q, rule.k, rule.v, rule.log_decay, rule.bonus, recurrence.log_gain)
    library.call("fw_bonus_step", abi.BonusStep(*sizes, *streams, memory, scale, o, *following))
    return o, following


def refuses_token(recurrence: Amplified) -> str | None:
    """Why `recurrence` is not one token of the rule that is written out for it; None if it is."""
    rule = recurrence.inner.inner
    if len(recurrence) != 1:
        return f"it has {len(recurrence)} tokens, not one"
    if not isinstance(rule, Bonus) or rule.q.shape[-1] != 1:
        return "its rule is no Bonus of one key"
    return None if recurrence.inner.floor is None else "its normaliser has a floor"


def _refuses(recurrence: Amplified) -> str | None:
    if refusal := refuses_token(recurrence):
        return refusal
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    if torch.is_grad_enabled():
        return "autograd may follow it"
    return library.refuse_tensors(*recurrence.streams.values())


NATIVE_BONUS_TOKEN = Kernel(
    "amplified bonus, one token (compiled)", Amplified, compute_token, _refuses, ("cpu",), True
)
