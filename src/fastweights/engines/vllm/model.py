"""Our language models as vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from fastweights.engines.vllm.forms import Kept, KeptState, kept_by, longest_page
from fastweights.engines.vllm.mixers import KeyMixer, StateMixer
from fastweights.engines.vllm.products import pack_weights
from fastweights.engines.vllm.served import ServedModel
from fastweights.engines.vllm.settings import head_width
from fastweights.engines.vllm.weights import load_weights, original_names
from fastweights.mixer import MixerState, MixerSum, SumState
from fastweights.models import FastWeightsForCausalLM


class ServedFastWeights(ServedModel):
    """A `FastWeightsForCausalLM` in vLLM: all tokens of a step go through its blocks side by side,
    and only its mixers know whose they are.

    Attributes:
        served: The model, whose mixers are replaced by those of `mixers`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model: Any = vllm_config.model_config
        self.served = FastWeightsForCausalLM(model.hf_config).to(model.dtype).eval()
        kept = kept_by(model.hf_config, model.dtype)
        page = longest_page(kept)
        layers = vllm_config.compilation_config.static_forward_context

        def replace(mixer: Any, one: Kept, name: str) -> nn.Module:
            if isinstance(one, KeptState):
                return StateMixer(mixer, one, page, name, layers)
            return KeyMixer(mixer, one, head_width(one), vllm_config, name)

        for index, (block, states) in enumerate(zip(self._blocks, kept, strict=True)):
            name = f"{prefix}model.layers.{index}.mixer"
            if isinstance(block.mixer, MixerSum):
                for place, one in enumerate(states):
                    inner = block.mixer.mixers[place]
                    block.mixer.mixers[place] = replace(inner, one, f"{name}{place}")
            else:
                block.mixer = replace(block.mixer, states[0], name)

    @property
    def _blocks(self) -> Any:
        return self.served.model.layers

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The embeddings ``[n d]`` of tokens ``[n]``."""
        return self.served.model.embed_tokens(input_ids)

    def read(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, positions: Tensor
    ) -> Tensor:
        trunk = self.served.model
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[arg-type]
        x = trunk.place(x[:, None], positions[:, None])
        alone = MixerState((), {}, positions)
        values: Tensor | None = None
        for block in self._blocks:
            several = isinstance(block.mixer, MixerSum)
            state = SumState((alone,) * len(block.mixer.mixers)) if several else alone
            x, _, values = block(x, state, None, None, trunk.method, values)
        return trunk.norm(x)[:, 0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The logits ``[n vocab]`` of hidden states ``[n d]``."""
        return self.served.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the weights of a checkpoint of ours, by their names there.

        Raises:
            ValueError: The checkpoint has other weights than the model.
        """
        load_weights(original_names(self.served), weights)
        pack_weights(self.served)
        return {name for name, _ in self.named_parameters()}

    @classmethod
    def page(cls, config: Any, dtype: torch.dtype) -> int:
        return longest_page(kept_by(config, dtype))
