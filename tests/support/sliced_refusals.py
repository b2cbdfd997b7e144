"""What is refused of slices, and what they send, on two processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from fastweights import Bidirectional, Decay, Softmax, evaluate
from fastweights.mixers import MIXERS
from fastweights.parallel import (
    HeadSharded,
    TimeSharded,
    divide,
    record_messages,
    use_method,
)
from processes import Report
from tiny import tiny, tokens


def stream(*shape: int) -> Tensor:
    return torch.ones(*shape)


def decay(t: int, h: int = 2) -> Decay:
    return Decay(stream(1, t, h, 4), stream(1, t, h, 4), stream(1, t, h, 4), -stream(1, t, h, 1))


def refusals() -> dict[str, Callable[[], object]]:
    """What each message is of."""
    group: Any = distributed.group.WORLD
    time, model = TimeSharded(group), tiny("metala")
    ids = tokens(1, 8)

    def read(**given: Any) -> object:
        with use_method(model, time):
            return model(**{"input_ids": ids, **given})

    q = stream(1, 4, 2, 4)
    return {
        "3 of process 0, 4 of process 1; cut": lambda: evaluate(
            decay(3 + distributed.get_rank()), None, time
        ),
        "has no state of a fixed size.*HeadSharded": lambda: evaluate(Softmax(q, q, q), None, time),
        "the record of a Decay has 3 heads, which 2 processes": lambda: evaluate(
            decay(4, 3), None, HeadSharded(group)
        ),
        "k of a Softmax has 3 heads": lambda: evaluate(
            Softmax(stream(1, 4, 6, 4), stream(1, 4, 3, 4), stream(1, 4, 3, 4)),
            None,
            HeadSharded(group),
        ),
        "group is a str; pass a ProcessGroup": lambda: TimeSharded("all"),  # type: ignore[arg-type]
        "a mesh of 2 dimensions": lambda: TimeSharded(
            init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "time"))
        ),
        "reads sequences from their end": lambda: Bidirectional(MIXERS["metala"](d=16))(
            torch.zeros(1, 4, 16), method=time
        ),
        "9 tokens cannot be divided among 2 .* cut them to 8 .* pad them to 10": lambda: divide(
            {"input_ids": tokens(1, 9)}, group
        ),
        "neither input_ids nor inputs_embeds": lambda: divide({"labels": ids}, group),
        "takes no argument called label": lambda: divide({"input_ids": ids, "label": ids}, group),
        "to which labels do not belong": lambda: read(labels=ids),
        "to which position_ids do not belong": lambda: read(position_ids=torch.arange(8)[None]),
        "use_cache = True, but by TimeSharded": lambda: read(use_cache=True),
        "a Linear has no FastWeightsForCausalLM": lambda: use_method(
            torch.nn.Linear(1, 1), time
        ).__enter__(),
    }


def check_refusals() -> Report:
    """0 for every message that came, 1 for the others."""
    return {message: _misses(message, call) for message, call in refusals().items()}


def _misses(message: str, call: Callable[[], object]) -> float:
    try:
        call()
    except (ValueError, TypeError) as error:
        return float(re.search(message, str(error)) is None)
    return 1.0


def count_bytes() -> Report:
    """The bytes that a process sends, forward and backward, by method and length."""
    group: Any = distributed.group.WORLD
    return {
        f"{type(method).__name__}, {t}": float(_sent(decay(t).map_streams(_leaf), method))
        for method in (TimeSharded(group), HeadSharded(group, gathers_state=False))
        for t in (16, 64)
    }


def _leaf(stream: Tensor) -> Tensor:
    return stream.clone().requires_grad_()


def _sent(record: Any, method: Any) -> int:
    with record_messages() as messages:
        evaluate(record, None, method)[0].sum().backward()
    return sum(message.sent for message in messages if message.sent > 16)
