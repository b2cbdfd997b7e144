"""MetaLA's parameter groups and conditions (Definition 4.1), found by running a mixer's
projections."""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fastweights.layers import LayerStream, TokenContext
from fastweights.mixer import Mixer
from fastweights.recurrence import NoFiniteFormError, Recurrence

Groups = frozenset[str]

APPROXIMATE = (frozenset({"Q", "K", "Λ_t"}), frozenset({"Q", "K"}), frozenset({"Q", "Λ_t"}))
"""The groups that can take any attention map (Proposition A2.2)."""

WRITES = ("k", "w", "log_gain")
"""The streams that say how much of a value is written; a `beta` goes with k, whose group there is
in any case.
"""


class Conditions(NamedTuple):
    """MetaLA's conditions of a mixer; None where one does not apply.

    Without an attention map only C0 does: the others are about maps.

    Attributes:
        linear: C0, linear complexity.
        dynamic: C1, dynamic memory.
        approximates: C2, static approximation.
        least: C3, least parameters.
    """

    linear: bool
    dynamic: bool | None
    approximates: bool | None
    least: bool | None


def conditions(mixer: Mixer) -> Conditions:
    """Evaluate Definition 4.1 for a mixer, by the propositions of appendix A2 on its `groups`.

    Softmax attention has no linear form: over the tokens that it stores its map is what the others
    approximate (C2), and it need not choose what to forget (C1) while it stores them all.
    """
    linear, record = not state_grows(mixer), _probe(mixer)[0]
    try:
        record.attention_map()
    except NoFiniteFormError:
        return Conditions(linear, dynamic=None, approximates=None, least=None)
    if record.surviving_state() is None:
        return Conditions(linear, dynamic=not linear, approximates=True, least=None)
    found = groups(mixer)
    dynamic, approximates = "Λ_t" in found, found in APPROXIMATE
    return Conditions(
        linear, dynamic, approximates, least=dynamic and approximates and len(found) == 2
    )


def groups(mixer: Mixer) -> Groups:
    """Find the parameter groups of a mixer: Q, K, and Λ (a constant decay) or Λ_t (one that x
    drives).

    Q and K are groups if parameters drive them; a key without parameters of its own, besides those
    of the decay, is tied to the decay and is not a group. What a delta rule erases counts as decay.
    """
    recurrence, sources = _probe(mixer)
    streams, kept = recurrence.streams, recurrence.surviving_state()
    writes = frozenset[str]().union(*(sources(streams.get(name)) for name in WRITES))
    found = {"Q"} if sources(streams["q"]) else set()
    if writes - sources(streams.get("log_decay")):
        found.add("K")
    if kept is not None and bool((kept != 1).any()):
        found.add("Λ_t" if "x" in sources(kept) else "Λ")
    return frozenset(found)


def state_grows(mixer: Mixer, lengths: tuple[int, int] = (1100, 1101)) -> bool:
    """Whether the state still grows after 1100 tokens, which is longer than any default window."""
    with torch.no_grad():
        shorter, longer = (_state_bytes(mixer, _tokens(mixer, length)) for length in lengths)
    return shorter < longer


def _state_bytes(mixer: Mixer, x: Tensor) -> int:
    return mixer(x, stream=LayerStream.stand_in(x))[1].nbytes


def _tokens(mixer: Mixer, length: int) -> Tensor:
    dtype = next(mixer.parameters()).dtype
    return torch.randn(1, length, mixer.d, generator=Generator().manual_seed(0), dtype=dtype)


class _Dependencies:
    """Names of what a stream depends on: parameters, and "x"."""

    def __init__(self, leaves: dict[str, Tensor]) -> None:
        self.leaves = leaves

    def __call__(self, stream: Tensor | None) -> frozenset[str]:
        if stream is None or not stream.requires_grad:
            return frozenset()
        real = torch.view_as_real(stream) if stream.is_complex() else stream
        # random weights, so that gradients do not cancel in the sum
        weighted = real * torch.rand(
            real.shape, generator=Generator().manual_seed(1), dtype=real.dtype
        )
        found = torch.autograd.grad(
            weighted.sum(), list(self.leaves.values()), retain_graph=True, allow_unused=True
        )
        named = zip(self.leaves, found, strict=True)
        return frozenset(
            name for name, gradient in named if gradient is not None and bool(gradient.any())
        )


def _probe(mixer: Mixer) -> tuple[Recurrence, _Dependencies]:
    """The recurrence of a few random tokens, and what tells where its streams come from.

    The parameters of a copy are moved a little first: one that starts at zero hides what it
    multiplies.
    """
    mixer, generator = deepcopy(mixer).double(), Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
    x = _tokens(mixer, 5).requires_grad_()
    recurrence, _ = mixer.project(x, TokenContext.start(x))
    return recurrence, _Dependencies({"x": x, **dict(mixer.named_parameters())})
