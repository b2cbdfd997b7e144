# pyright: reportMissingImports=false
"""What vLLM asks of the classes of all models with states."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec


class ServedModel(nn.Module):
    """A model of vLLM whose layers keep pages of bytes, all of one size."""

    is_hybrid: ClassVar[bool] = True
    has_inner_state: ClassVar[bool] = True
    supports_mamba_prefix_caching: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def page(cls, config: Any, dtype: torch.dtype) -> int:
        """The bytes of a page, by the configuration of the model and its dtype."""

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        """The shape of a layer's state: a page of bytes."""
        model: Any = vllm_config.model_config
        return ((cls.page(model.hf_config, model.dtype),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """The dtype of a layer's state, whatever the settings: bytes."""
        del vllm_config
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """How vLLM copies a state that several sequences begin with: page by page."""
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        """The same for each kind of layers with states, of which there is one."""
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())
