"""A language model of every mixer that reads slices of sequences, beside one that reads them."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Generator, Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastweights import MIXERS, FastWeightsForCausalLM
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
POSITIONED = ("softmax", "fox", "rwkv4", "mamba2", "lolcats", "hybrid")
"""Models that are read without padding and documents, too: nobody is asked for positions then."""

WITHOUT_EFFECT = (
    *("softmax", "mla", "olmo2", "fox", "loglinear_mamba2", "loglinear_gdn", "pgdn", "pkda"),
    *("ttt_linear", "ttt_mlp"),
)


def draw_batch() -> dict[str, Tensor]:
    """Sequences with padding on either side and inside, whose documents begin where a slice does,
    too.
    """
    g = Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=g)
    starts = torch.tensor([[5, 6, 12, 18], [1, 12, 13, 19]])
    segments = torch.zeros_like(ids).scatter(1, starts, 1).cumsum(1)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[0, 10:13] = mask[1, 20:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "segments": segments, "attention_mask": mask, "labels": labels}


def batches() -> dict[str, dict[str, Tensor]]:
    batch = draw_batch()
    plain = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    return {"plain": plain, "packed and padded": batch}


def compare_models(names: Collection[str] = LAYERS) -> Report:
    """The largest relative error of the loss and of all gradients, by mixer and batch."""
    group = distributed.group.WORLD
    return {
        f"{name}, {kind}": compare(build(name), method_for(name, group), batch, group)
        for kind, batch in batches().items()
        for name in names
        if kind != "plain" or name in POSITIONED
    }


def compare_checkpointed() -> Report:
    """The same where activations are made again in the backward."""
    model, group = build("hybrid"), distributed.group.WORLD
    model.gradient_checkpointing_enable()
    return {"hybrid, checkpointed": compare(model, HybridSharded(group), draw_batch(), group)}


def method_for(name: str, group: Any) -> Method:
    """What tokens do to the state of some rules has no form that could travel; what is beside them
    goes its own way.
    """
    if name in WITHOUT_EFFECT:
        return HeadSharded(group)
    return HybridSharded(group) if name in ("hybrid", "shared") else TimeSharded(group)


def compare(
    ours: FastWeightsForCausalLM, method: Method, batch: dict[str, Tensor], group: Any
) -> float:
    """Of a model, beside one of the same weights that reads whole sequences."""
    whole = copy.deepcopy(ours)
    with use_method(ours, method):
        loss = ours(**divide(batch, group)).loss
        loss.backward()
    sum_gradients(ours.parameters(), group)
    expected = whole(**batch).loss
    expected.backward()
    pairs = [(total(loss.detach()), expected.detach())]
    return worst(pairs + gradients(ours, whole))


def gradients(ours: nn.Module, whole: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Both gradients of every parameter that has one in either model."""
    found = list[tuple[Tensor, Tensor]]()
    for a, b in zip(ours.parameters(), whole.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            found.append((a.grad, b.grad))
    return found


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    return max(error(got, want, floor=1e-3) for got, want in pairs)


def compare_states(names: Collection[str] = tuple(MIXERS)) -> Report:
    """Errors of what follows, read by every process alike from the state that it has been left."""
    group, batch = distributed.group.WORLD, draw_batch()
    return {f"state of {name}": compare_state(name, batch, group) for name in names}


@torch.no_grad()
def compare_state(name: str, batch: dict[str, Tensor], group: Any) -> float:
    torch.manual_seed(0)
    mixer = MIXERS[name](d=16).double()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    more = torch.randn(2, 3, 16, dtype=torch.float64)
    keep, segments = batch["attention_mask"].bool(), batch["segments"]
    size = LENGTH // distributed.get_world_size()
    span = slice(distributed.get_rank() * size, (distributed.get_rank() + 1) * size)
    y, state = mixer(
        x[:, span], keep=keep[:, span], segments=segments[:, span], method=HybridSharded(group)
    )
    y_whole, state_whole = mixer(x, keep=keep, segments=segments)
    assert torch.equal(state.position, state_whole.position)
    pairs = [(y[keep[:, span]], y_whole[:, span][keep[:, span]])]
    return worst([*pairs, (mixer(more, state)[0], mixer(more, state_whole)[0])])


def compare_sharded_parameters() -> Report:
    """Errors of gradients where parameters are sharded over all processes, and time over some."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "time"))
    return {
        f"parameters sharded, {name}": compare_sharded(mesh, name) for name in ("hybrid", "shared")
    }


def compare_sharded(mesh: DeviceMesh, name: str) -> float:
    ours, whole, batch = build(name), build(name), draw_batch()
    everyone = mesh._flatten("everyone")
    for part in (*ours.model.layers, ours):
        fully_shard(part, mesh=everyone)
    rows = {name: value.chunk(2)[mesh["data"].get_local_rank()] for name, value in batch.items()}
    with use_method(ours, HybridSharded(mesh["time"])):
        loss = ours(**divide(rows, mesh["time"])).loss
        # fully_shard averages over all processes; over time, gradients are to be summed
        (mesh["time"].size() * loss).backward()
    for row in range(2):
        (whole(**{name: value.chunk(2)[row] for name, value in batch.items()}).loss / 2).backward()
    pairs = zip(ours.parameters(), whole.parameters(), strict=True)
    return worst([(a.grad.full_tensor(), b.grad) for a, b in pairs])  # type: ignore[union-attr]


def build(name: str) -> FastWeightsForCausalLM:
    if name == "shared":
        blocks = [{"layers": [0, 1], "width": 12, "rank": 2, "attention_rank": 2}]
        return tiny("linear", shared_blocks=blocks).train()
    return tiny(name).train()
