"""One Hugging Face model for every mixer and every hybrid of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from fastweights.layers import SwiGLU
from fastweights.mixer import MixerState
from fastweights.mixers import make
from fastweights.models.cache import FastWeightsCache
from fastweights.models.config import FastWeightsConfig
from fastweights.models.inputs import kept, require_cache, require_ids
from fastweights.models.loss import LOGITS_AT_ONCE, next_token_loss
from fastweights.shapes import Embedded, Mask, Segments


class Block(GradientCheckpointingLayer):
    """x ← x + Mixer(RMSNorm x);  x ← x + SwiGLU(RMSNorm x)"""

    def __init__(self, config: FastWeightsConfig, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.mixer_norm = nn.RMSNorm(d, config.norm_eps)
        self.mixer = make(d=d, **config.layer_mixers[layer])
        self.mlp_norm = nn.RMSNorm(d, config.norm_eps)
        self.mlp = SwiGLU(d, config.mlp_size)

    def forward(
        self, x: Embedded, state: MixerState | None, keep: Mask | None, segments: Segments | None
    ) -> tuple[Embedded, MixerState]:
        y, after = self.mixer(self.mixer_norm(x), state, keep=keep, segments=segments)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), after


@runtime_checkable
class _Started(Protocol):
    def reset_parameters(self) -> None: ...


class FastWeightsPreTrainedModel(PreTrainedModel):
    """How weights start and load.

    Linear weights are normal with variance 1 / fan-in, those that write to the residual stream 2 / N of that for N
    layers, embeddings with variance 1 / d (MesaNet appendix); what a mixer starts in its own way comes last.
    """

    config: FastWeightsConfig
    config_class = FastWeightsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, *args: Any, strict: bool = True, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but weights that the checkpoint lacks are an error, unless ``strict=False``."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        missing = sorted(info["missing_keys"])
        if strict and missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} weights of this {cls.__name__}, among them "
                f"{', '.join(missing[:3])}; pass strict=False to start them anew"
            )
        return loaded if output_loading_info else model

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Skips a module once all that is below it is loaded (transformers, for foreign code, looks only at what the
        module itself owns, and so would skip blocks and mixers whose parameters all belong to their parts)."""
        tensors = module.state_dict(keep_vars=True).values()
        if not (tensors and all(map(_is_loaded, tensors))):
            super()._initialize_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        match module:
            case nn.Linear():
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            case nn.Embedding():
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
            case Block():
                self._shrink(module.mixer.W_o)
                self._shrink(module.mlp.W_3)
            case _Started():
                with _loaded_kept(module):
                    module.reset_parameters()

    def _shrink(self, projection: nn.Module) -> None:
        if isinstance(projection, nn.Linear):
            std = (2 / self.config.num_hidden_layers / projection.in_features) ** 0.5
            nn.init.normal_(projection.weight, std=std)


def _is_loaded(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


@contextmanager
def _loaded_kept(module: nn.Module) -> Iterator[None]:
    """Undoes what the block does to parameters and buffers that come from a checkpoint."""
    tensors = module.state_dict(keep_vars=True).values()
    loaded = [(tensor, tensor.detach().clone()) for tensor in tensors if _is_loaded(tensor)]
    yield
    with torch.no_grad():
        for tensor, value in loaded:
            tensor.copy_(value)


class FastWeightsModel(FastWeightsPreTrainedModel):
    """Token ids → hidden states: embeddings times √d, the blocks, a final RMSNorm."""

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        segments: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states ``[b t d]`` of ``input_ids [b t]``, or of ``inputs_embeds [b t d]`` (before the √d).

        attention_mask    ``[b t]`` or, with all tokens that the cache has seen, ``[b s+t]``; 1 = real, 0 = padding
        past_key_values   continued from, and advanced in place; with `use_cache` a new one is made if it is None
        use_cache         None: `config.use_cache`, but not in training
        segments          ``[b t]`` integers; where they change, a packed document begins with an empty memory
        Raises ValueError for inputs that do not fit.
        """
        if output_attentions:
            raise ValueError("there are no attentions to output; see Recurrence.attention_map()")
        x = self._embedded(input_ids, inputs_embeds)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = require_cache(past_key_values)
        keep = kept(attention_mask, x, cache.get_seq_length())
        trace = [x]
        states = []
        for block, state in zip(self.layers, cache.before(len(self.layers), len(x)), strict=True):
            x, state = block(x, state, keep, segments)
            states += [state] if use_cache else []
            trace += [x] if output_hidden_states else []
        if use_cache:
            cache.advance(states, x.shape[1])
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=(*trace[:-1], x) if output_hidden_states else None,
        )

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Embedded:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        x = inputs_embeds
        if x is None:
            x = self.embed_tokens(require_ids(input_ids, self.embed_tokens.num_embeddings))
        if x.shape[1] == 0:
            raise ValueError("there are no tokens; begin an empty prompt with the bos token")
        return x * self.config.hidden_size**0.5


class FastWeightsForCausalLM(FastWeightsPreTrainedModel, GenerationMixin):
    """The language model: `FastWeightsModel` and a linear head, tied to the embeddings if the config says so."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.model = FastWeightsModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        segments: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits ``[b t vocab]``, and with `labels` the mean loss; see `FastWeightsModel.forward` for the rest.

        labels              ``[b t]``, like input_ids; −100 is not counted, the shift by one happens here. Give the
                            first token of a packed document −100 if the one before it is not to predict it
        logits_to_keep      only of the last so many tokens (0: all), or of the tokens with these indices
        num_items_in_batch  what the summed loss is divided by instead of the number of labels
        skip_logits         None: in training with labels, where the loss never holds the logits of all tokens
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            segments=segments,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        x = outputs.last_hidden_state
        skip_logits = self.training and labels is not None if skip_logits is None else skip_logits
        span = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(
            loss=None if labels is None else self._loss(x, labels, num_items_in_batch),
            logits=None if skip_logits else self.logits(x[:, span]),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def logits(self, x: Tensor) -> Tensor:
        """``[… vocab]`` of final hidden states ``[… d]``, capped."""
        z, cap = self.lm_head(x), self.config.logit_cap
        return z if cap is None else cap * torch.tanh(z / cap)

    def _loss(self, x: Embedded, labels: Tensor, items: Tensor | int | None) -> Tensor:
        chunk = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        return next_token_loss(self.logits, x, labels, items=items, chunk=chunk)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={wanted!r} does not exist for {type(self).__name__}, whose cache is a "
                "FastWeightsCache of constant size per recurrent layer; leave it out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = FastWeightsCache()
        else:
            base: Any = super()
            base._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
