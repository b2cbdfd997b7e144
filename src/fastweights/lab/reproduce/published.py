"""Models as published code mistakenly trains them, for comparison with the intended models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fastweights.lab.tasks import Batch, ListOps, Protocol, Segment
from fastweights.mixers import Mamba


class Destroyed(Mamba):
    """
    f_q  x W_C             f_α  e^(Δ_t A),  Δ_t = softplus(x W¹_Δ W²_Δ + b_Δ)
    f_k  x W_B             f_g  SiLU(u W_z)
    f_v  Δ_t ⊙ x           d_v = H = expand·d,  d_k / H = N

    the weights of linear layers redrawn with a deviation of 0.02 and their biases zeroed, as
    GPT-2's initialisation does to every linear layer (dsf-mqar @ 7c5aff8, mad-lab before 756b19f):
    Δ starts at log 2 instead of 0.001 to 0.1.
    """

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.W_Delta_2.weight, std=0.02)
        nn.init.zeros_(self.W_Delta_2.bias)


@dataclass(frozen=True)
class ListOpsTwice(ListOps):
    """ListOps with the softmax of a softmax, as DSF's code for the Long Range Arena trains it.

    See its models/transformer.py:365 and models/mamba.py:218, followed by cross-entropy: with 10
    classes a certain prediction still costs 1.46 nats.
    """

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return super().logits(model, batch).softmax(-1)


def with_second_softmax(protocol: Protocol) -> Protocol:
    """Return a protocol of ListOps with a second softmax."""
    train, test = (tuple(map(_twice, segments)) for segments in (protocol.train, protocol.test))
    return replace(protocol, train=train, test=test)


def _twice(segment: Segment) -> Segment:
    return replace(segment, task=ListOpsTwice(**vars(segment.task)))
