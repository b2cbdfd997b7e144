"""Mixtures of experts as transformers names them: one by one in files, stacked in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fastweights.importers.plan import LayerPlan, Table, TensorSource
from fastweights.importers.source import CheckpointSource

GATED = {"W_1": "gate_proj", "W_2": "up_proj", "W_3": "down_proj"}
PLAIN = {"W_1": "up_proj", "W_2": "down_proj"}
NUMBERED = {
    rf"(\.experts\.\d+)\.{ours}_proj\.": rf"\1.w{theirs}."
    for ours, theirs in {"gate": 1, "up": 3, "down": 2}.items()
}
LIKE_MIXTRAL = {r"\.mlp\.": ".block_sparse_moe.", **NUMBERED}
"""Parts of the names of experts one by one → those of published files after Mixtral's."""
GROUPED = {
    "chosen": "num_experts_per_tok",
    "normalized": "norm_topk_prob",
    "groups": "n_group",
    "chosen_groups": "topk_group",
    "scale": "routed_scaling_factor",
}
"""Fields of `Routing` → what families after DeepSeek-V3 call them."""


def mlps_of_layers(
    source: CheckpointSource,
    sparse: Sequence[bool],
    dense: Table,
    experts: Callable[[CheckpointSource], LayerPlan],
) -> list[LayerPlan]:
    """The MLPs of layers, some of which may be experts.

    Args:
        source: The checkpoint.
        sparse: Which of the layers.
        dense: The weights of the others' MLP.
        experts: Maps those of experts, if there are any.
    """
    width = source.settings.get("intermediate_size", None)
    kinds: dict[bool, LayerPlan] = {False: ({"name": "gated", "width": width}, dense)}
    if any(sparse):
        kinds[True] = experts(source)
    return [kinds[one] for one in sparse]


def experts(
    source: CheckpointSource, theirs: str, count: int, width: int, *, gated: bool = True
) -> Table:
    """Map the experts of a layer.

    Args:
        source: The checkpoint, whose names say whether experts are stacked.
        theirs: Name of their list of experts.
        count: Experts of a layer.
        width: Channels inside an expert.
        gated: Whether they are `GatedMLP`, or else `MLP`.
    """
    if not any(name.endswith(f"{theirs}.down_proj") for name in source.names):
        return {
            f"mlp.experts.{e}.{a}.weight": f"{theirs}.{e}.{b}.weight"
            for e in range(count)
            for a, b in (GATED if gated else PLAIN).items()
        }
    return stacked_experts(
        f"{theirs}.gate_up_proj" if gated else f"{theirs}.up_proj",
        f"{theirs}.down_proj",
        count,
        width,
        gated=gated,
    )


def stacked_experts(first: str, last: str, count: int, width: int, *, gated: bool = True) -> Table:
    """Map experts whose weights are stacked, the gate in front of what it multiplies.

    Args:
        first, last: Names of their tensors ``[count (2·)width d]`` and ``[count d width]``.
        count: Experts of a layer.
        width: Channels inside an expert.
        gated: Whether they are `GatedMLP`, or else `MLP`.
    """
    parts = ("W_1", "W_2")[: 1 + gated]
    table: Table = {}
    for e in range(count):
        for place, name in enumerate(parts):
            rows = of_expert(e, place * width, (place + 1) * width)
            table[f"mlp.experts.{e}.{name}.weight"] = TensorSource(first, rows)
        table[f"mlp.experts.{e}.{'W_3' if gated else 'W_2'}.weight"] = TensorSource(
            last, of_expert(e)
        )
    return table


def of_expert(e: int, start: int = 0, stop: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the outputs from `start` up to `stop` of expert e."""
    return lambda weights: weights[e, start:stop]
