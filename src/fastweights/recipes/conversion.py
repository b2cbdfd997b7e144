"""A conversion in numbers, stage by stage, without the weights: its losses go forward and backward
through a model of one and of two layers without numbers, from which all layers follow."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.analysis.cost import PASSES
from fastweights.budget import NoRoomError, TrainingPlan, Workload
from fastweights.budget.footprint import without_numbers
from fastweights.budget.ledger import MemoryLedger
from fastweights.budget.memory import FLOAT, RESERVE
from fastweights.kernels.triton.chips import Chip
from fastweights.linearize.convert.attention import attend_all, branches
from fastweights.linearize.convert.attention_layers import find_attention_layers
from fastweights.linearize.convert.conversion import linearize
from fastweights.linearize.convert.rules import branch_of
from fastweights.linearize.distill.adapt import projections
from fastweights.linearize.distill.recipe import LinearizationRecipe, StageConfig, TransferConfig
from fastweights.linearize.distill.trained import Adapters
from fastweights.linearize.distill.transfer import BackwardInForward
from fastweights.linearize.evaluate.logits import next_logits
from fastweights.recipes.recipe import ConversionRecipe
from fastweights.recurrence import Softmax
from fastweights.render.units import bytes_in_words
from fastweights.training.language.adapters import LoRA
from fastweights.training.loop.stage import go_backward

CHUNK = 64


@dataclass(frozen=True)
class StageBudget:
    """One stage of a conversion.

    Attributes:
        name: "transfer" or "finetune".
        steps: Updates.
        trained: Number of parameters that are trained.
        products: Operations per token of matrix products, forward and backward.
        attention: Of softmax attention and recurrences.
        weights: Bytes of all weights, the trained ones in float32.
        optimizer: Bytes of AdamW's two means.
        working: The most bytes that a step takes beside: activations, gradients, logits.
    """

    name: str
    steps: int
    trained: int
    products: int
    attention: int
    weights: int
    optimizer: int
    working: int

    @property
    def operations(self) -> int:
        """Operations per token that are computed."""
        return self.products + self.attention

    @property
    def memory(self) -> int:
        """The most bytes of a device at once."""
        return self.weights + self.optimizer + self.working


@dataclass(frozen=True)
class ConversionBudget:
    """The numbers of a planned conversion.

    Attributes:
        workload: What was planned; its tokens are those of both stages.
        parameters: Of the softmax model.
        accumulate: Parts of a device's share of a batch.
        sequences: Sequences that a device computes at once.
        stages: Attention transfer, if there is one, and adaptation.
    """

    workload: Workload
    parameters: int
    accumulate: int
    sequences: int
    stages: tuple[StageBudget, ...]

    @property
    def memory(self) -> int:
        """The most bytes of a device at once, in either stage."""
        return max(stage.memory for stage in self.stages)

    @property
    def total_operations(self) -> float:
        """Operations of both stages."""
        per_step = self.workload.batch * self.workload.length
        return float(sum(stage.operations * stage.steps * per_step for stage in self.stages))

    @property
    def device_hours(self) -> float:
        done = self.workload
        return self.total_operations / (done.device.peak(True) * done.utilization) / 3600

    @property
    def hours(self) -> float:
        return self.device_hours / self.workload.placing.devices

    @property
    def cost(self) -> float | None:
        price = self.workload.price
        return None if price is None else price * self.device_hours


OF_PLANS = ("total_operations", "hours", "device_hours", "cost")
OF_TRAININGS = ("model_operations", "executed_operations", "seconds_per_step")


def record_of(found: TrainingPlan | ConversionBudget) -> dict[str, Any]:
    """The numbers of a plan, with those that follow from them, in bytes, seconds and operations."""
    names = OF_TRAININGS if isinstance(found, TrainingPlan) else ("memory",)
    derived = {name: getattr(found, name) for name in (*OF_PLANS, *names)}
    return {**asdict(found), **derived, "steps": found.workload.steps}


def plan_conversion(recipe: ConversionRecipe, workload: Workload) -> ConversionBudget:
    """Compute what a conversion takes, without weights and without its devices.

    Raises:
        NoRoomError: If it does not fit; the message says by how much.
        TrainingError: If the batch cannot be divided evenly.
    """
    share = workload.sequences_at_once(1)
    parts = [n for n in range(1, share + 1) if share % n == 0]
    tried = [workload.accumulate] if workload.accumulate else parts
    room = (1 - RESERVE) * workload.device.memory
    fitting = (n for n in tried if _fits(recipe, workload, n, room))
    found = _budget(recipe, workload, next(fitting, tried[-1]))
    excess = found.memory - room
    if excess <= 0:
        return found
    raise NoRoomError(
        f"the conversion takes {bytes_in_words(found.memory)} of a {workload.device.name} at"
        f" {found.sequences} sequences of {workload.length:,} tokens at once,"
        f" {bytes_in_words(excess)} more than it has for it; "
        + (
            "take a device with more memory, or shorter sequences"
            if found.sequences == 1
            else f"--accumulate {parts[-1]} computes them one by one"
        )
    )


def _fits(recipe: ConversionRecipe, workload: Workload, accumulate: int, room: float) -> bool:
    """Whether all stages fit; the last takes most as a rule, and is asked first."""
    sequences = workload.sequences_at_once(accumulate)
    stages = (_stage(name, 0, recipe, workload, sequences) for name in reversed(recipe.stage_steps))
    return all(stage.memory <= room for stage in stages)


def _budget(recipe: ConversionRecipe, workload: Workload, accumulate: int) -> ConversionBudget:
    sequences = workload.sequences_at_once(accumulate)
    stages = tuple(
        _stage(name, steps, recipe, workload, sequences)
        for name, steps in recipe.stage_steps.items()
    )
    one, two = (
        _softmax_model(recipe.shape.value, n, recipe.dtype).num_parameters() for n in (1, 2)
    )
    parameters = one + (_layers(recipe) - 1) * (two - one)
    return ConversionBudget(workload, parameters, accumulate, sequences, stages)


def _stage(
    name: str, steps: int, recipe: ConversionRecipe, workload: Workload, sequences: int
) -> StageBudget:
    length, layers = workload.length, _layers(recipe)
    one, two = (
        _measure(_texts(recipe), recipe.settings, n, name, sequences, length, workload.device.chip)
        for n in (1, 2)
    )
    found = {key: one[key] + (layers - 1) * (two[key] - one[key]) for key in one}
    return StageBudget(
        name,
        steps,
        found["trained"],
        found["products"] // (sequences * length),
        layers * _attention_operations(name, recipe, length),
        found["weights"],
        2 * FLOAT * found["trained"],
        found["working"],
    )


def _texts(recipe: ConversionRecipe) -> tuple[str, str]:
    """The model's fields as JSON and the dtype of its weights, by which measures are remembered."""
    return json.dumps(recipe.shape.value), recipe.dtype


@lru_cache
def _measure(
    model_of: tuple[str, str],
    recipe: LinearizationRecipe,
    layers: int,
    name: str,
    sequences: int,
    length: int,
    chip: Chip | None,
) -> dict[str, int]:
    """Trained parameters, bytes of all, operations of products, and the most bytes beside, of a
    stage in a model of few layers.
    """
    (stage,) = (stage for stage in recipe.stages if stage.name == name)
    fields, dtype = model_of
    softmax = _softmax_model(json.loads(fields), layers, dtype)
    model = _prepare(softmax, recipe, stage).train()
    with without_numbers(chip):
        _take_numbers(model)
        ids = torch.zeros(sequences, length, dtype=torch.long)
        with MemoryLedger() as ledger, FlopCounterMode(display=False) as counter:
            ledger.know(ids, *model.parameters(), *model.buffers())
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "float32"):
                _go(model, stage, ids)
    return {
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "products": counter.get_total_flops(),
        "working": ledger.peak,
    }


def _prepare(softmax: Any, recipe: LinearizationRecipe, stage: StageConfig) -> nn.Module:
    with torch.device("meta"):
        model = linearize(softmax, recipe.analog)
        if isinstance(stage.trained, Adapters):
            return _adapt(model, stage.trained.lora)
        return stage.trained.prepare(model)


def _adapt(model: Any, lora: LoRA) -> nn.Module:
    """Put adapters where peft would, which need not be installed for a plan, and keep copies of the
    branches as it does."""
    model.requires_grad_(False)
    model.originals = nn.ModuleList(map(deepcopy, branches(model).values()))
    for path in projections(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _Adapted(model.get_submodule(path), lora))
    return model


class _Adapted(nn.Module):
    """A frozen projection and its adapter, in float32: x W + (α / r) x A B."""

    def __init__(self, base: nn.Linear, lora: LoRA) -> None:
        super().__init__()
        self.base, self.scale = base, lora.alpha / lora.rank
        self.A = nn.Linear(base.in_features, lora.rank, bias=False)
        self.B = nn.Linear(lora.rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return (y + self.B(self.A(x.to(self.A.weight.dtype))) * self.scale).to(y.dtype)


def _go(model: nn.Module, stage: StageConfig, ids: Tensor) -> None:
    """Forward and backward of a stage; adaptation learns from every token."""
    if isinstance(stage, TransferConfig):
        attend_all(model, {"input_ids": ids}, BackwardInForward(stage.loss))  # type: ignore[arg-type]
        return
    logits = next_logits(model, {"input_ids": ids}).flatten(0, 1).clone()
    go_backward(F.cross_entropy(logits, ids[:, 1:].flatten()))


def _take_numbers(model: nn.Module) -> None:
    """Move a model from the meta device to where tensors are fake."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            fake = torch.empty(p.shape, dtype=p.dtype)
            setattr(module, name, nn.Parameter(fake, requires_grad=p.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _attention_operations(name: str, recipe: ConversionRecipe, length: int) -> int:
    """Of one layer per token: transfer computes softmax once and its linear counterpart, whose
    backward pass takes as much again twice; adaptation the latter alone.
    """
    model = _softmax_model(recipe.shape.value, 1, recipe.dtype)
    with torch.device("meta"):
        attention = find_attention_layers(model)[0]
        q, k, v = attention.zeros(1)
        branch = branch_of(recipe.settings.analog, attention)
        linear = PASSES * branch.record(q, k, v).chunk_operations(length, CHUNK)
        softmax = Softmax(q, k, v).chunk_operations(length, CHUNK)
    return linear + (softmax if name == "transfer" else 0)


def _softmax_model(fields: dict[str, Any], layers: int, dtype: str) -> LlamaForCausalLM:
    wanted: dict[str, Any] = {**fields, "num_hidden_layers": layers}
    config = LlamaConfig(**wanted)
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))


def _layers(recipe: ConversionRecipe) -> int:
    return int(recipe.shape.value["num_hidden_layers"])
