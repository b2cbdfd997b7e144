"""A language model of every mixer that reads slices of sequences, beside one that reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, distributed

from fastweights import FastWeightsForCausalLM
from fastweights.methods import Method
from fastweights.parallel import (
    HeadSharded,
    HybridSharded,
    TimeSharded,
    divide,
    sum_gradients,
    use_method,
)
from processes import Report, total
from tiny import LAYERS, VOCABULARY, tiny
from tolerances import error

LENGTH = 24


def draw_batch() -> dict[str, Tensor]:
    """Sequences with padding on either side and inside, whose documents begin where a slice does,
    too.
    """
    g = Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=g)
    starts = torch.tensor([[5, 6, 12, 18], [1, 12, 13, 23]])
    segments = torch.zeros_like(ids).scatter(1, starts, 1).cumsum(1)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[0, 10:13] = mask[1, 20:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "segments": segments, "attention_mask": mask, "labels": labels}


def batches() -> dict[str, dict[str, Tensor]]:
    batch = draw_batch()
    plain = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    return {"plain": plain, "packed and padded": batch}


def compare_models() -> Report:
    """The largest relative error of the loss and of all gradients, by mixer and batch."""
    group = distributed.group.WORLD
    assert group is not None
    return {
        f"{name}, {kind}": compare(name, method_for(name, group), batch, group)
        for name in LAYERS
        for kind, batch in batches().items()
    }


def method_for(name: str, group: Any) -> Method:
    """Softmax to all tokens has no state that could travel; what is beside it goes its own way."""
    if name == "softmax":
        return HeadSharded(group)
    return HybridSharded(group) if name == "hybrid" else TimeSharded(group)


def compare(name: str, method: Method, batch: dict[str, Tensor], group: Any) -> float:
    ours, whole = build(name), build(name)
    with use_method(ours, method):
        part = divide(batch, group)
        loss = ours(**part).loss
        loss.backward()
    sum_gradients(ours.parameters(), group)
    expected = whole(**batch).loss
    expected.backward()
    pairs = [(total(loss.detach()), expected.detach())]
    for a, b in zip(ours.parameters(), whole.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        pairs += [] if a.grad is None or b.grad is None else [(a.grad, b.grad)]
    return max(error(got, want, floor=1e-3) for got, want in pairs)


def build(name: str) -> FastWeightsForCausalLM:
    return tiny(name).double().train()
