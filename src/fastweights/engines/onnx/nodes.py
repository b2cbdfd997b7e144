"""Recurrences and convolutions as the nodes that ONNX has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.exported.steps import Steps
from fastweights.engines.onnx.domains import Domain
from fastweights.kernels import Kernel
from fastweights.methods import Method
from fastweights.ops import Convolution
from fastweights.recurrence import Bonus, Decay, Delta, Normalized, Recurrence, Selective, Slots
from fastweights.recurrence.streams import State


def node(
    domain: Domain,
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    like: Sequence[Tensor],
) -> Sequence[Tensor]:
    """The results of a node, which have the shapes and dtypes of the tensors `like`."""
    return torch.onnx.ops.symbolic_multi_out(
        f"{domain.name}::{name}",
        inputs,
        dict(attributes),
        dtypes=[result.dtype for result in like],
        shapes=[result.shape for result in like],
        version=domain.version,
    )


@dataclass(frozen=True)
class Nodes(Method):
    """A LinearAttention node where the rule is `Decay` or `Delta` on real streams, or made of them;
    elsewhere `Steps`.
    """

    domain: Domain

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        match recurrence:
            case Normalized():
                return recurrence.divide_output(self.evaluate(recurrence.append_ones(), state))  # type: ignore[arg-type]
            case Selective():
                return self.evaluate(recurrence.plain, state)
            case Slots():
                return recurrence.evaluate_with(self.evaluate, state)  # type: ignore[arg-type]
            case Bonus() if isinstance(state, Tensor):
                o, after = self.evaluate(recurrence.shift_queries(), state)
                return recurrence.complete_output(o, state), after
            case Decay() | Delta() if isinstance(state, Tensor) and state.dtype == torch.float32:
                return self._attend(recurrence, state)
            case _:
                return Steps().evaluate(recurrence, state)

    def _attend(self, rule: Decay | Delta, state: Tensor) -> tuple[Tensor, Tensor]:
        b, t, h = rule.shape
        key = rule.key if isinstance(rule, Decay) else rule.k
        beta = rule.beta if isinstance(rule, Delta) else None
        packed = [
            None if s is None else s.float().expand(b, t, h, -1).flatten(2)
            for s in (rule.q, key, rule.v, rule.log_decay, beta)
        ]
        q, k, v, decay, beta = packed
        kind = "delta" if isinstance(rule, Delta) else "linear"
        gated = "gated" if kind == "linear" else "gated_delta"
        attributes = {
            "update_rule": kind if decay is None else gated,
            "scale": 1.0,
            "q_num_heads": h,
            "kv_num_heads": h,
        }
        assert v is not None
        inputs = (q, k, v, state, decay, beta)
        o, after = node(self.domain, "LinearAttention", inputs, attributes, (v, state))
        o = o.unflatten(-1, (h, -1))
        return rule.add_skip(o) if isinstance(rule, Decay) else o.to(rule.output), after


def convolution_node(domain: Domain) -> Kernel:
    """The kernel that makes of a short convolution a CausalConvWithState node."""

    def compute(convolution: Convolution) -> tuple[Tensor, Tensor]:
        tail, x = convolution.tail.mT, convolution.x.mT
        weight = convolution.taps.mT[:, None]
        activation = {"activation": "silu" if convolution.silu else "none"}
        inputs = (x, weight, convolution.bias, tail)
        y, after = node(domain, "CausalConvWithState", inputs, activation, (x, tail))
        return y.mT, after.mT

    return Kernel("CausalConvWithState (ONNX)", Convolution, compute, _refuses)


def _refuses(convolution: Convolution) -> str | None:
    if convolution.document is not None:
        return "documents begin among its tokens"
    return None if convolution.tail.shape[1] else "it has one tap"
