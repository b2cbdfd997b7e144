"""Recurrences and convolutions as the nodes that ONNX has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.exported.steps import Steps
from fastweights.engines.onnx.domains import Domain
from fastweights.engines.onnx.turned import Turned, turns
from fastweights.kernels import Kernel
from fastweights.methods import Method
from fastweights.ops import Convolution
from fastweights.recurrence import (
    Bonus,
    Decay,
    Delta,
    LongConvolution,
    Normalized,
    Recurrence,
    Selective,
    Slots,
    Substeps,
)
from fastweights.recurrence.streams import State


def node(
    domain: Domain,
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
) -> Sequence[Tensor]:
    """The results of a node, of these shapes and in float32."""
    return torch.onnx.ops.symbolic_multi_out(
        f"{domain.name}::{name}",
        inputs,
        dict(attributes),
        dtypes=[torch.float32] * len(shapes),
        shapes=shapes,
        version=domain.version,
    )


_RULES = {
    (False, False): "linear",
    (True, False): "gated",
    (False, True): "delta",
    (True, True): "gated_delta",
}
"""What LinearAttention calls rules, by whether they decay and whether they erase."""


_COMPOSED = (Normalized, Selective, Slots, Bonus, Substeps)
"""Rules made of others that there may be nodes for."""

Streams = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q, k, v, log α (None: nothing decays) and β (None: nothing is erased)."""


@dataclass(frozen=True)
class Nodes(Method):
    """A LinearAttention node where the rule is `Decay` or `Delta` on real streams, or made of them;
    elsewhere `Steps`.
    """

    domain: Domain

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        if isinstance(recurrence, LongConvolution):
            raise ValueError(
                "a LongConvolution is computed by FFT, whose graph would be of one length"
            )
        if isinstance(recurrence, _COMPOSED):
            return recurrence.evaluate_with(self.evaluate, state)  # type: ignore[arg-type]
        nodes: Any = {Decay: self._decay, Delta: self._delta}
        return nodes.get(type(recurrence), Steps().evaluate)(recurrence, state)

    def _decay(self, rule: Decay, state: Tensor) -> tuple[Tensor, State]:
        if turns(rule):
            turned = Turned.of(rule)
            o, after = turned.leave(*self._attend(turned.streams, turned.enter(state)))
            return rule.add_skip(o), after
        return self._read(rule, (rule.q, rule.key, rule.v, rule.log_decay, None), state)

    def _delta(self, rule: Delta, state: Tensor) -> tuple[Tensor, State]:
        return self._read(rule, (rule.q, rule.k, rule.v, rule.log_decay, rule.beta), state)

    def _read(self, rule: Decay | Delta, streams: Streams, state: Tensor) -> tuple[Tensor, State]:
        if state.dtype != torch.float32:
            return Steps().evaluate(rule, state)
        o, after = self._attend(streams, state)
        return rule.add_skip(o), after

    def _attend(self, streams: Streams, state: Tensor) -> tuple[Tensor, Tensor]:
        """(o ``[b t g v]``, final state ``[b h k v]``) of q ``[b t g k]``, whose heads read those
        of the state one after another, k, v, log α (or None) and β (or None: nothing is erased).
        """
        (b, h, _, values), heads = state.shape, max(streams[0].shape[2], state.shape[1])
        t = next((s.shape[1] for s in streams if s is not None and s.shape[1] != 1), 1)
        given = [
            None if s is None else s.float().expand(b, t, n, -1).flatten(2)
            for s, n in zip(streams, (heads, h, h, h, h), strict=True)
        ]
        q, k, v, decay, beta = given
        attributes = {
            "update_rule": _RULES[decay is not None, beta is not None],
            "scale": 1.0,
            "q_num_heads": heads,
            "kv_num_heads": h,
        }
        shapes = ((b, t, heads * values), state.shape)
        o, after = node(
            self.domain, "LinearAttention", (q, k, v, state, decay, beta), attributes, shapes
        )
        return o.unflatten(-1, (heads, -1)), after


def convolution_node(domain: Domain) -> Kernel:
    """The kernel that makes of a short convolution a CausalConvWithState node."""

    def compute(convolution: Convolution) -> tuple[Tensor, Tensor]:
        tail, x = convolution.tail.mT, convolution.x.mT
        weight = convolution.taps.mT[:, None]
        activation = {"activation": "silu" if convolution.silu else "none"}
        inputs = (x, weight, convolution.bias, tail)
        shapes = (x.shape, tail.shape)
        y, after = node(domain, "CausalConvWithState", inputs, activation, shapes)
        return y.mT, after.mT

    return Kernel("CausalConvWithState (ONNX)", Convolution, compute, _refuses)


def _refuses(convolution: Convolution) -> str | None:
    if convolution.document is not None:
        return "documents begin among its tokens"
    return None if convolution.tail.shape[1] else "it has one tap"
