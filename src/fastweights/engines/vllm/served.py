"""What vLLM asks of the classes of all models with states."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
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

    @abstractmethod
    def read(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, positions: Tensor
    ) -> Tensor:
        """The final hidden states ``[n d]`` of tokens, or vectors in their place; see `forward`."""

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The final hidden states ``[n d]`` of all tokens of a step.

        Args:
            input_ids: ``[n]``, or None with `inputs_embeds` ``[n d]``.
            positions: ``[n]``, how many tokens of its sequence are before each.
            intermediate_tensors: None, as there is one process.
            inputs_embeds: Vectors in place of tokens.
            kwargs: What vLLM tells models that ask for more.
        """
        return self.read(input_ids, inputs_embeds, positions)

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
