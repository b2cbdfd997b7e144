"""How torchtitan divides, compiles and recomputes a model of ours, by its own functions."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from fastweights.engines.titan.model import TitanLanguageModel


def parallelize(
    model: TitanLanguageModel,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> TitanLanguageModel:
    """Apply activation checkpointing, torch.compile and FSDP2 to every block, in this order.

    With ``data_parallel_replicate_degree`` above 1 it is HSDP, and with
    ``data_parallel_shard_degree = 1`` as well DDP.

    Args:
        model: On the meta device.
        parallel_dims: The meshes of the run.
        training: Precision and offload.
        parallelism: When weights are sharded again.
        compile_config: Whether blocks are compiled, and with which backend.
        ac_config: What is recomputed in the backward; None for nothing.
        dump_folder: Where policies of recomputation write what they draw.
    """
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    decoder: Any = model
    mesh = data_mesh(parallel_dims)
    apply_fsdp_to_decoder(
        decoder,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    if mesh.device_type == "cpu":
        _add_before_scaling(model)
    return model


def data_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The processes among which weights are replicated, if they are, and sharded."""
    shards = "fsdp" if parallel_dims.spmd_backend == "partial_dtensor" else "dp_shard"
    replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    return parallel_dims.get_mesh([*replicas, shards])


def _add_before_scaling(model: nn.Module) -> None:
    """Have gradients reduced by plain sums: gloo has no sum with a factor in front."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
