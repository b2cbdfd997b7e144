"""Recurrences made of recurrences, by the kernel of what they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.kernels.native.bonus import refuses_token
from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import CHUNK, State
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.composed import Amplified, Normalized
from fastweights.recurrence.preconditioned import Preconditioned
from fastweights.recurrence.scales import EMPTY_LOG_SCALE, round_up
from fastweights.recurrence.selective import Selective
from fastweights.recurrence.signed import Signed
from fastweights.recurrence.slots import Slots, SlotState
from fastweights.recurrence.substeps import Substeps
from fastweights.recurrence.windowed import normalize_by_last, with_ones
from fastweights.recurrence.windowed_rule import Windowed


def compute_with_normaliser(recurrence: Normalized, state: State) -> tuple[Tensor, State]:
    """(o, state) from the inner record with its column of ones."""
    return recurrence.divide_output(run_fastest(recurrence.append_ones(), state))


def compute_with_gain(recurrence: Amplified, state: tuple[Tensor, Tensor]) -> tuple[Tensor, State]:
    """(o, state) from the rescaled record."""
    return recurrence.evaluate_with(run_fastest, state)


def compute_with_sign(recurrence: Signed, state: State) -> tuple[Tensor, State]:
    """(o, state) from the record whose signs are on its streams."""
    return recurrence.restore_signs(run_fastest(recurrence.without_signs(), state))


def compute_substeps(recurrence: Substeps, state: State) -> tuple[Tensor, State]:
    """(o, state) from the record of all steps."""
    return recurrence.read_tokens(run_fastest(recurrence.inner, state))


def compute_preconditioned(
    recurrence: Preconditioned, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(o, state) from the squares of the keys, and then from the rule that they precondition."""
    return recurrence.evaluate_with(run_fastest, state)


def compute_slots(recurrence: Slots, state: SlotState) -> tuple[Tensor, SlotState]:
    """(o, state) from the recurrences of keys and of values."""
    return recurrence.evaluate_with(run_fastest, state)


def compute_with_bonus(recurrence: Bonus, state: Tensor) -> tuple[Tensor, State]:
    """(o, state) from the plain rule, read one token behind."""
    o, after = run_fastest(recurrence.shift_queries(), state)
    return recurrence.complete_output(o, state), after


def compute_written_out(recurrence: Selective, state: Tensor) -> tuple[Tensor, State]:
    """(o, state) from the plain rule."""
    return run_fastest(recurrence.plain, state)


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
    rule, least = recurrence.inner.inner, recurrence.initial_log_scale
    assert isinstance(rule, Bonus)
    gain, before = recurrence.log_gain.double()[:, 0], m.double()
    decayed = before if rule.log_decay is None else before + rule.log_decay.double()[:, 0]
    q, k, bonus = (s[:, 0, :, :, None] for s in (rule.q, rule.k, rule.bonus))
    before = torch.where(q[..., 0] == 0, EMPTY_LOG_SCALE, before)
    with torch.no_grad():
        after = round_up(torch.maximum(decayed, gain).clamp(min=least), m.dtype)
        read = torch.maximum(before, gain).clamp(min=least)
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
NORMALIZED = Kernel("normalised: the inner record's kernel", Normalized, compute_with_normaliser)
AMPLIFIED = Kernel("amplified: the rescaled record's kernel", Amplified, compute_with_gain)
SIGNED = Kernel("signed: the inner record's kernel", Signed, compute_with_sign)
SLOTS = Kernel("slots: the kernel of decays, twice", Slots, compute_slots)
SUBSTEPS = Kernel("substeps: the inner record's kernel", Substeps, compute_substeps)
PRECONDITIONED = Kernel(
    "preconditioned: the kernels of its two rules", Preconditioned, compute_preconditioned
)
BONUS = Kernel("bonus: the plain rule's kernel, one token behind", Bonus, compute_with_bonus)
BESIDE_WINDOW = Kernel(
    "window in blocks, beside the rule's kernel (torch)", Windowed, compute_beside_window
)
SELECTIVE = Kernel("selective: the plain rule's kernel", Selective, compute_written_out)
