"""Linearized models as vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from fastweights.engines.transformers.passes import merge_passes
from fastweights.engines.vllm.attentions import ServedAttentions, copy_stored
from fastweights.engines.vllm.groups import LayerGroup
from fastweights.engines.vllm.layout import PageLayout
from fastweights.engines.vllm.products import pack_weights
from fastweights.engines.vllm.served import ServedModel
from fastweights.engines.vllm.settings import head_width
from fastweights.engines.vllm.states import PagedStateLayer
from fastweights.engines.vllm.weights import load_weights
from fastweights.linearize import AttentionLayer, LinearBranch
from fastweights.linearize.convert.attention import attention_at, scale_scores
from fastweights.linearize.convert.transformers_seams import (
    attentions_with_branch,
    configurations,
    register_attention,
    set_implementation,
)

IMPLEMENTATION = "fastweights_vllm"
"""The name by which transformers calls `attend`."""


class LinearCache(PagedStateLayer):
    """The states of a linear attention in vLLM's pages."""

    def __init__(
        self, branch: LinearBranch, layout: PageLayout, page: int, name: str, layers: dict[str, Any]
    ) -> None:
        super().__init__(layout, page, name, layers)
        self.read_after, self.read_in_pages = branch.read_after, branch.read_in_pages

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """The outputs ``[n h v]`` of all tokens ``[n · ·]`` of a step, a sequence's behind each
        other.
        """
        del options
        groups = self.groups()
        if groups is None:
            return self.read_after(None, q[None], k[None], v[None])[0][0]
        if len(groups) == 1 and groups[0].is_all_of(len(q)):
            return self._read(groups[0], q, k, v).flatten(0, 1)
        o = q.new_zeros(*q.shape[:2], v.shape[2])
        for group in groups:
            group.put(o, self._read(group, q, k, v))
        return o

    def _read(self, group: LayerGroup, *streams: Tensor) -> Tensor:
        """The outputs ``[n t h v]`` of a group."""
        own = map(group.take, streams)
        state = {"keep": group.keep, "begins": group.begins}
        return self.read_in_pages(self.paged, group.slots, *own, **state)


class KeyCache(nn.Module):
    """The keys and values of a softmax attention in vLLM's own cache."""

    def __init__(self, attention: AttentionLayer, config: VllmConfig, name: str) -> None:
        super().__init__()
        self.width, self.values = head_width(attention), attention.value_dim
        self.attention = Attention(
            attention.heads,
            self.width,
            attention.scaling,
            num_kv_heads=attention.kv_heads,
            cache_config=config.cache_config,
            logits_soft_cap=attention.softcap,
            per_layer_sliding_window=attention.window,
            prefix=name,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """The outputs ``[n h v]`` of all tokens ``[n · ·]`` of a step."""
        module = options["module"]
        q = scale_scores(module, q.transpose(0, 1)[None], options)[0].transpose(0, 1)
        q, k, v = (F.pad(s, (0, self.width - s.shape[-1])).flatten(1) for s in (q, k, v))
        return self.attention(q, k, v).unflatten(-1, (-1, self.width))[..., : self.values]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a served layer; transformers calls it as its attention function.

    Args:
        module: The layer's attention module.
        query: ``[1 h n k]``, of all tokens of a step.
        key: ``[1 g n k]``.
        value: ``[1 g n v]``.
        attention_mask: None: vLLM says whose tokens these are.
        options: Further arguments of transformers' attention functions.
    """
    del attention_mask
    q, k, v = (s[0].transpose(0, 1) for s in (query, key, value))
    return vars(module)["vllm_cache"].attend(q, k, v, {**options, "module": module})[None], None


def no_mask(**options: Any) -> None:
    """The mask of a step: none."""


register_attention(IMPLEMENTATION, attend, no_mask)


class Through(nn.Module):
    """In the place of a model without a head: returns the hidden states that it is given."""

    def forward(self, *, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        """Return ``inputs_embeds [b t d]`` as final hidden states."""
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class ServedLinearized(ServedModel):
    """A linearized model in vLLM: transformers' code, whose attentions keep what they have read in
    vLLM's caches.

    Attributes:
        trunk: The model without its head.
        head: The model that makes logits of hidden states as transformers' does.
        caches: Those of the attentions.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model: Any = vllm_config.model_config
        config = copy_stored(model.hf_config)  # whose implementation of attention is ours alone
        served: Any = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
        for module in attentions_with_branch(served):
            module.linear_branch.float()
        self._places = served.state_dict(keep_vars=True)
        self._attach_caches(served, vllm_config, prefix)
        merge_passes(served)
        set_implementation(configurations(served), IMPLEMENTATION)
        self.trunk = getattr(served, served.base_model_prefix)
        setattr(served, served.base_model_prefix, Through())
        self.head = served

    def _attach_caches(self, served: Any, vllm_config: VllmConfig, prefix: str) -> None:
        model: Any = vllm_config.model_config
        kept = ServedAttentions.of(model.hf_config, model.dtype)
        layers = vllm_config.compilation_config.static_forward_context
        self.caches = nn.ModuleList()

        def attach(module: Any, cache: nn.Module) -> None:
            vars(module)["vllm_cache"] = cache  # whose weights are not the module's
            self.caches.append(cache)

        for module in attentions_with_branch(served):
            name = f"{prefix}layers.{module.layer_idx}.linear"
            layout = kept.linear[module.layer_idx]
            attach(module, LinearCache(module.linear_branch, layout, kept.page, name, layers))
        for one in kept.softmax:
            name = f"{prefix}layers.{one.layer}.softmax"
            attach(attention_at(served, one.path), KeyCache(one, vllm_config, name))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The embeddings ``[n d]`` of tokens ``[n]``."""
        return self.trunk.get_input_embeddings()(input_ids)

    def read(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, positions: Tensor
    ) -> Tensor:
        given: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        inputs = {name: one[None] for name, one in given.items() if one is not None}
        output = self.trunk(**inputs, position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The logits ``[n vocab]`` of hidden states ``[n d]``."""
        return self.head(inputs_embeds=hidden_states[None], use_cache=False).logits[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the weights of a checkpoint, by their names there.

        Raises:
            ValueError: The checkpoint has other weights than the model.
        """
        load_weights(self._places, weights)
        pack_weights(self)
        return {name for name, _ in self.named_parameters()}

    @classmethod
    def page(cls, config: Any, dtype: torch.dtype) -> int:
        return ServedAttentions.of(config, dtype).page
