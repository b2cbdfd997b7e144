"""Recurrences made of recurrences, by the kernel of what they are made of."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastweights.kernels.native.bonus import refuses_token
from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import CHUNK
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized
from fastweights.recurrence.head_groups import HeadGroups
from fastweights.recurrence.preconditioned import Preconditioned
from fastweights.recurrence.scales import EMPTY_LOG_SCALE, round_up
from fastweights.recurrence.selective import Selective
from fastweights.recurrence.signed import Signed
from fastweights.recurrence.slots import Slots
from fastweights.recurrence.substeps import Substeps
from fastweights.recurrence.windowed import normalize_by_last, with_ones
from fastweights.recurrence.windowed_rule import Windowed
from fastweights.recurrence.wrapper import Composed


def compute_composed(recurrence: Composed, state: Any) -> tuple[Tensor, Any]:
    """(o, state) by the kernels of what the record is made of."""
    return recurrence.evaluate_with(run_fastest, state)


def compute_beside_window(
    recurrence: Windowed, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(o, state) from the rule on what leaves the window, and the window in blocks of queries."""
    block = max(recurrence.window, CHUNK)
    return recurrence.evaluate_with(run_fastest, state, block if len(recurrence) > block else None)


def compute_bonus_token(
    recurrence: Amplified, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(o, state) of one token, the equations of `Amplified` and `Bonus` with one key written out:
    all exponentials at once.
    """
    memory, m = state
    rule, least = cast(Bonus, recurrence.inner.inner), recurrence.initial_log_scale
    gain, before = recurrence.log_gain.double()[:, 0], m.double()
    decayed = before if rule.log_decay is None else before + rule.log_decay.double()[:, 0]
    q, k, bonus = (s[:, 0, :, :, None] for s in (rule.q, rule.k, rule.bonus))
    # a zero query reads nothing, whatever the state's scale
    before = torch.where(q[..., 0] == 0, EMPTY_LOG_SCALE, before)
    with torch.no_grad():
        # m_t = max(m_{t-1} + log α, w, least); o reads S before its token decays it
        after = round_up(torch.maximum(decayed, gain).clamp(min=least), m.dtype)
        read = torch.maximum(before, gain).clamp(min=least)
    # of S and k in the state, and of S and the bonus in o: none is above 0
    logs = (decayed - after, gain - after, before - read, gain - read)
    kept, written, seen, own = (
        torch.stack(torch.broadcast_tensors(*logs)).exp().to(m.dtype)[..., None]
    )
    values = with_ones(rule.v.to(m.dtype).transpose(1, 2))
    sums = q * seen * memory + bonus * own * values
    o = normalize_by_last(sums)[..., :-1].transpose(1, 2).to(recurrence.output)
    return o, (kept * memory + k * written * values, after.to(m.dtype))


BONUS_TOKEN = Kernel(
    "amplified bonus, one token (torch)",
    Amplified,
    compute_bonus_token,
    refuses_token,
    ("cpu",),
)
NORMALIZED = Kernel("normalised: the inner record's kernel", Normalized, compute_composed)
AMPLIFIED = Kernel("amplified: the rescaled record's kernel", Amplified, compute_composed)
SIGNED = Kernel("signed: the inner record's kernel", Signed, compute_composed)
SLOTS = Kernel("slots: the kernel of decays, twice", Slots, compute_composed)
SUBSTEPS = Kernel("substeps: the inner record's kernel", Substeps, compute_composed)
PRECONDITIONED = Kernel(
    "preconditioned: the kernels of its two rules", Preconditioned, compute_composed
)
BONUS = Kernel("bonus: the plain rule's kernel, one token behind", Bonus, compute_composed)
BESIDE_WINDOW = Kernel(
    "window in blocks, beside the rule's kernel (torch)", Windowed, compute_beside_window
)
HEAD_GROUPS = Kernel("groups of heads: each group's kernel", HeadGroups, compute_composed)
SELECTIVE = Kernel("selective: the plain rule's kernel", Selective, compute_composed)
