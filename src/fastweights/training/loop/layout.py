"""How a training lies in the memory of its processes: whole in each (DDP) or divided (FSDP2)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.pytorch_utils import Conv1D

from fastweights.errors import TrainingError
from fastweights.ranges import POSITIVE_INTEGER
from fastweights.training.loop.processes import Processes
from fastweights.training.loop.stage import Optimization, Stage, trainable_parameters

LARGE = 1 << 20
"""Numbers from which on a parameter is divided, whatever layer it belongs to."""


@dataclass(frozen=True)
class Layout:
    """How a training lies in the memory of its processes, and what it computes twice.

    It is no part of a run: the same run may go on under another layout, and on another number of
    processes. It changes results by rounding only.

    Attributes:
        shard: Whether the processes divide the large parameters, their gradients and what the
            optimiser keeps of them (FSDP2, block by block); else each has all of them.
        offload: Whether the parts lie in the main memory and visit the accelerator.
        recompute: Whether the backward pass computes the inside of every block again, which then
            need not be kept.
        compile: Whether torch.compile compiles every block.
        slices: How many processes, one after another, divide every sequence in time.

    Raises:
        TrainingError: If there is something to offload, but nothing is divided.
    """

    shard: bool = False
    offload: bool = False
    recompute: bool = False
    compile: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        POSITIVE_INTEGER.require(slices=self.slices)
        if self.offload and not self.shard:
            raise TrainingError(
                "offload keeps the parts of a divided model in the main memory; ask for shard too"
            )
        if not self.shard and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            raise TrainingError(
                "the configuration of accelerate launch asks for FSDP, which this command decides"
                " itself: add --shard, and take distributed_type: MULTI_GPU"
            )

    def place(self, stage: Stage, config: Optimization, processes: Processes) -> Placement:
        """Lay the model of a stage into the memory of the processes that train it.

        Raises:
            TrainingError: If the model cannot be computed so.
        """
        if self.recompute:
            _recompute_blocks(stage.model)
        if self.compile:
            for block in blocks_of(stage.model):
                block.compile()
        if processes.count == 1:
            return Placement(stage.model, processes)
        if self.shard:
            return FullySharded(stage.model, processes, config.bf16, self.offload)
        if stage.calls_module:
            return Replicated(stage.model, processes)
        return Averaged(stage.model, processes)


class Placement:
    """A model of which each process has all, and trains it alone.

    Attributes:
        model: The model.
        processes: The processes.
        module: What computes the model's output in training: itself, or with an exchange of
            gradients around it.
    """

    is_divided = False
    """Whether the processes have different parts of the parameters that are trained."""

    def __init__(self, model: Any, processes: Processes) -> None:
        self.model, self.processes, self.module = model, processes, model

    def accumulate(self, is_last: bool) -> AbstractContextManager[object]:
        """Compute a part of a batch in this context, its last one or not."""
        return nullcontext()

    def exchange(self) -> None:
        """Average those gradients over the processes that the backward pass has not."""

    def adopt(self, name: str, tensor: Tensor) -> Tensor:
        """Return of a whole tensor what this process keeps of it.

        Args:
            name: The parameter that lies as this tensor does.
            tensor: The tensor, or a number that has no parts.
        """
        return tensor


class Averaged(Placement):
    """A model that is whole in every process, whose gradients are averaged after the backward pass.

    So a stage may go backward in any way, and a parameter that only some processes have used is no
    special case; but the exchange waits for the whole backward pass.
    """

    def __init__(self, model: Any, processes: Processes) -> None:
        super().__init__(model, processes)
        self.trained = list(trainable_parameters(model).values())
        processes.begin_alike(self.trained)

    def exchange(self) -> None:
        self.processes.average_gradients(self.trained)


class Replicated(Placement):
    """A model that is whole in every process, whose gradients are averaged during the backward
    pass, by DistributedDataParallel.
    """

    def __init__(self, model: Any, processes: Processes) -> None:
        super().__init__(model, processes)
        # Looking for unused parameters also keeps the buckets as they are: by default they are made
        # anew after the first update, and sums of a run that is resumed are rounded otherwise.
        self.module = nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=True
        )
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")

    def accumulate(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self.module.no_sync()


class FullySharded(Placement):
    """A model whose large parameters are divided over the processes, block by block, by FSDP2.

    Divided are the weights of linear layers and embeddings with a row for each process at least,
    and whatever else is large; in bf16
    those of a block travel in bfloat16, in which autocast multiplies by them anyway. All others,
    such as a mixer's decays and the weights of norms, are whole in every process and in the dtype
    that they have, so that numbers are those of a model that is not divided. Where some parameters
    are frozen, those that are trained, such as adapters, stay whole too.
    """

    def __init__(self, model: Any, processes: Processes, bf16: bool, offload: bool) -> None:
        super().__init__(model, processes)
        _fully_shard(model, processes, bf16, offload)
        self.whole = [p for p in trainable_parameters(model).values() if not isinstance(p, DTensor)]
        processes.begin_alike(self.whole)

    @property
    def is_divided(self) -> bool:  # type: ignore[override]
        return any(isinstance(p, DTensor) for p in trainable_parameters(self.model).values())

    def exchange(self) -> None:
        self.processes.average_gradients(self.whole)

    def adopt(self, name: str, tensor: Tensor) -> Tensor:
        like = self._parameters.get(name)
        if not isinstance(like, DTensor) or like.shape != tensor.shape:
            return tensor
        device = like.device
        return distribute_tensor(
            tensor.to(device), like.device_mesh, like.placements, src_data_rank=None
        )

    @cached_property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def _fully_shard(model: Any, processes: Processes, bf16: bool, offload: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    kind, whole = processes.device.type, _stay_whole(model, processes.count)
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(kind, (processes.count,)),
        offload_policy=CPUOffloadPolicy(pin_memory=kind != "cpu") if offload else OffloadPolicy(),
        ignored_params=whole,
    )
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks_of(model):
        shard(block, mp_policy=mixed if bf16 else MixedPrecisionPolicy())
    shard(model, reshard_after_forward=True)  # else a validation would leave it whole
    for parameter in whole:
        parameter.data = parameter.data.to(processes.device)
    # What blocks return of their states are views, which nobody changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _stay_whole(model: nn.Module, count: int) -> set[nn.Parameter]:
    """The parameters that every one of `count` processes keeps whole."""
    layers = nn.Linear, nn.Embedding, Conv1D
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, layers)}
    parameters = list(model.parameters())
    some_frozen = not all(p.requires_grad for p in parameters)
    return {
        p
        for p in parameters
        if (id(p) not in matrices and p.numel() < LARGE)
        or p.dim() == 0
        or len(p) < count
        or (some_frozen and p.requires_grad)
    }


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """List the blocks of a model: the modules that its class says belong on one device.

    Raises:
        TrainingError: If there are none.
    """
    whole: Any = getattr(model, "_no_split_modules", None)
    names = set(whole or ())
    found = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in names]
    if not found:
        raise TrainingError(
            f"a {type(model).__name__} does not say what its blocks are (_no_split_modules), by"
            " which it would be divided or compiled; leave out --shard and --compile"
        )
    return found


def _recompute_blocks(model: Any) -> None:
    # transformers calls it by another name from 5.20 on, and warns of the old one
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise TrainingError(
            f"a {type(model).__name__} cannot compute its blocks again; leave out --recompute"
        ) from error


def is_part(tensor: Tensor) -> bool:
    """Whether other processes have other parts of a tensor."""
    return isinstance(tensor, DTensor)


def gather(tensors: Mapping[str, Tensor], is_first: bool) -> dict[str, Tensor]:
    """Gather whole tensors in the first process, one after another; called by all.

    Tensors that are whole already are returned as they are, those of parts in the main memory.
    """
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor
            continue
        whole = tensor.full_tensor()
        if is_first:
            found[name] = whole.cpu()
    return found


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients down to a norm of at most `largest`, and return the norm before.

    As torch's `clip_grad_norm_`, for parameters of which some are divided and others whole.
    """
    kinds = divide([p for p in parameters if p.grad is not None])
    norms = [_whole_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    if not norms:
        return torch.zeros(())
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        clip_grads_with_norm_(kind, largest, norm)
    return norm


def _whole_norm(gradients: list[Tensor]) -> Tensor:
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def divide(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into those that are whole and those of parts, which no operation mixes."""
    kinds = [[p for p in parameters if is_part(p) == part] for part in (False, True)]
    return [kind for kind in kinds if kind]


def divide_groups(optimizers: Iterable[optim.Optimizer]) -> None:
    """Divide the parameter groups of optimisers likewise."""
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            first, *others = divide(group["params"])
            settings = {name: value for name, value in group.items() if name != "params"}
            group["params"] = first
            for other in others:
                optimizer.add_param_group({**settings, "params": other})
