"""A layer's states in vLLM's cache of mamba layers, and what a step does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec

from fastweights.engines.vllm.backend import NAME, state_backend
from fastweights.engines.vllm.groups import LayerGroup, group
from fastweights.engines.vllm.layout import PageLayout


@dataclass(frozen=True, eq=False)
class StateMetadata:
    """What all layers with states are told of a step.

    Attributes:
        groups: Its sequences.
    """

    groups: list[LayerGroup]


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Groups the sequences of each step."""

    kv_cache_spec: MambaSpec
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StateMetadata:
        """Read the places of tokens and pages in what vLLM tells all its backends."""
        common: Any = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        slots = mamba_get_block_table_tensor(
            common.block_table_tensor, common.seq_lens, self.kv_cache_spec, mode
        )[:, 0]
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        lengths = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
        return StateMetadata(group(starts, lengths, slots, common.seq_lens.device))


class StateBackend(AttentionBackend):
    """vLLM's name for how a layer gets its metadata."""

    @staticmethod
    def get_name() -> str:
        """Return the name."""
        return NAME

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """Return the class that builds the metadata."""
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True: there are states and no keys."""
        return True


class PagedStateLayer(nn.Module, MambaBase):
    """A layer for which vLLM keeps a page per sequence.

    Attributes:
        layout: Where its tensors stand in a page.
        page: The bytes of a page, which may be more than the layout has: all layers' pages are as
            long.
        name: The layer's, by which vLLM knows it.
        paged: The tensors ``[n …]`` of all n pages, where they lie.
    """

    def __init__(self, layout: PageLayout, page: int, name: str, layers: dict[str, Any]) -> None:
        super().__init__()
        self.layout, self.page, self.name = layout, page, name
        self._take(torch.empty(0, page, dtype=torch.uint8))
        layers[name] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages ``[n 1 1 bytes]`` that vLLM has made."""
        self._take(kv_cache.squeeze(dim=(1, 2)).view(torch.uint8)[:, : self.page])

    def _take(self, pages: Tensor) -> None:
        self.kv_cache: tuple[Tensor, ...] = (pages,)
        self.paged = self.layout.of_pages(pages)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the one shape: that of a page."""
        return ((self.page,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of a page's numbers: bytes."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Ours among vLLM's kinds of mamba layers."""
        return state_backend()

    def groups(self) -> list[LayerGroup] | None:
        """The sequences of this step; None while vLLM only measures memory."""
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.name].groups  # type: ignore[index]
