"""One Hugging Face model for every mixer and every hybrid of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

from fastweights.layers import Linear, TokenContext
from fastweights.methods import Auto, Method
from fastweights.mixers.shared import SharedBlock
from fastweights.models.block import Block, dropout, normalization
from fastweights.models.cache import FastWeightsCache
from fastweights.models.cache_names import (
    CACHE,
    GeneratesByEitherName,
    cache_argument,
    one_cache,
    with_both_names,
)
from fastweights.models.checkpointing import carry_states
from fastweights.models.config import FastWeightsConfig
from fastweights.models.continuous import BatchesAtOnce
from fastweights.models.inputs import (
    padding_first,
    require_cache,
    require_divided,
    require_embeddings,
    require_ids,
    require_labels,
    require_positions,
    require_token_ids,
)
from fastweights.models.loss import (
    LOGITS_AT_ONCE,
    LanguageModelOutput,
    Term,
    cross_entropy,
    cross_entropy_and_log_z,
    mean_loss,
    next_token_loss,
    select_targets,
)
from fastweights.models.packing import Boundaries, tokens_of_sequences, tokens_of_slice
from fastweights.models.token_reader import GeneratesNatively
from fastweights.models.tokens import Tokens
from fastweights.shapes import Embedded, Mask, Segments


class FastWeightsPreTrainedModel(PreTrainedModel):
    """How the weights of every model here are initialised and loaded.

    Linear weights are normal with variance 1 / fan-in, those that write to the residual stream 2 /
    N of that for N layers, embeddings with variance 1 / d (MesaNet appendix D); with
    `config.initializer_range` all have that standard deviation, and those that write to the stream
    1 / √(2 N) of it (GPT-2). What a mixer starts in its own way comes last.
    """

    config: FastWeightsConfig
    config_class = FastWeightsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    new_head: str | None = None
    """The name of the part that starts anew, with a warning of transformers, where a checkpoint
    has no weight of it."""
    _no_split_modules = ["Block"]  # noqa: RUF012
    _is_stateful = False  # as transformers means it: a state that cannot go back, see the cache

    @classmethod
    def from_pretrained(
        cls, *args: Any, strict: bool = True, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a checkpoint as transformers does, but refuse one that lacks weights.

        Args:
            strict: Whether a missing weight is an error; False starts it anew.
            output_loading_info: Whether to return transformers' loading report as well.

        Raises:
            ValueError: The checkpoint lacks weights of this model, or is of another kind.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        missing = sorted(set(info["missing_keys"]) - model._new_head_weights(info["missing_keys"]))
        if strict and missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} weights of this {cls.__name__}, among them "
                f"{', '.join(missing[:3])}; pass strict=False to start them anew"
            )
        return loaded if output_loading_info else model

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        **kwargs: Any,
    ) -> None:
        super()._set_gradient_checkpointing(
            enable, carry_states(gradient_checkpointing_func), **kwargs
        )

    def _new_head_weights(self, missing: set[str]) -> set[str]:
        """The weights of the new head if all of them are missing, else none."""
        if self.new_head is None:
            return set()
        head = {
            f"{self.new_head}.{name}" for name in self.get_submodule(self.new_head).state_dict()
        }
        return head if head <= missing else set()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise a module unless everything below it came from the checkpoint.

        For foreign code transformers looks only at what the module itself owns, and so would skip
        blocks and mixers whose parameters all belong to their parts.
        """
        tensors = module.state_dict(keep_vars=True).values()
        if not (tensors and all(map(_comes_from_checkpoint, tensors))):
            super()._initialize_weights(module)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Any implementation that transformers knows, or of its hub: mixers attend by the kernels
        of this library whichever is asked for.
        """
        name = attn_implementation or "eager"
        known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
        if name not in known and "/" not in name:
            raise ValueError(
                f"attn_implementation={name!r} is none of transformers' ({', '.join(known)});"
                f" leave it out: a {type(self).__name__} attends by kernels of its own"
            )
        return name

    def _init_weights(self, module: nn.Module) -> None:
        match module:
            case nn.Linear():
                nn.init.normal_(
                    module.weight, std=self.config.initializer_range or module.in_features**-0.5
                )
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            case nn.Embedding():
                nn.init.normal_(
                    module.weight, std=self.config.initializer_range or module.embedding_dim**-0.5
                )
            case Block():
                for writer in module.writers:
                    self._shrink(writer)
            case nn.Module(reset_parameters=reset) if callable(reset):
                with _preserve_checkpoint_values(module):
                    reset()

    def _shrink(self, projection: nn.Module) -> None:
        std, layers = self.config.initializer_range, self.config.num_hidden_layers
        if isinstance(projection, nn.Linear):
            variance = 2 / layers / projection.in_features if std is None else std**2 / (2 * layers)
            nn.init.normal_(projection.weight, std=variance**0.5)


def _comes_from_checkpoint(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


@contextmanager
def _preserve_checkpoint_values(module: nn.Module) -> Iterator[None]:
    """Undo what the block does to parameters and buffers that come from a checkpoint."""
    tensors = module.state_dict(keep_vars=True).values()
    loaded = [
        (tensor, tensor.detach().clone()) for tensor in tensors if _comes_from_checkpoint(tensor)
    ]
    yield
    with torch.no_grad():
        for tensor, value in loaded:
            tensor.copy_(value)


class FastWeightsTrunk(FastWeightsPreTrainedModel):
    """The blocks of a model between its embedding and its head.

    Scales the vectors, adds learnt positions, runs the blocks and a final norm. `embed_tokens`
    makes the vectors; what it reads is up to the subclasses, which end with ``post_init()``.

    Attributes:
        method: How the blocks' recurrences are evaluated (see `use_method`).
    """

    method: Method = Auto()

    def __init__(self, config: FastWeightsConfig, embed_tokens: nn.Module) -> None:
        super().__init__(config)
        self.embed_tokens = embed_tokens
        positions = config.learnt_positions
        self.embed_positions = (
            None if positions is None else nn.Embedding(positions, config.hidden_size)
        )
        self.dropout = dropout(config.embedding_dropout)
        self.shared = nn.ModuleList(config.make_shared_blocks())
        self.layers = nn.ModuleList(
            Block(config, layer, self.shared_by(layer)) for layer in range(config.num_hidden_layers)
        )
        self.norm = normalization(config)

    def shared_by(self, layer: int) -> SharedBlock | None:
        """The block that this layer shares with others; None for none."""
        number = self.config.layer_shared_blocks.get(layer)
        block = None if number is None else self.shared[number]
        assert block is None or isinstance(block, SharedBlock)
        return block

    def run_blocks(
        self,
        x: Embedded,
        keep: Mask | None,
        segments: Segments | None,
        cache: FastWeightsCache,
        *,
        use_cache: bool,
        trace: list[Embedded] | None = None,
    ) -> Embedded:
        """Run all blocks on ``x [b t d]``, continuing from `cache`.

        Args:
            x: Vectors of the tokens, before they are scaled.
            keep: ``[b t]``, False for padding; None without padding.
            segments: ``[b t]`` integers that change where a packed document begins.
            cache: What the blocks remember of earlier tokens.
            use_cache: Whether to advance `cache` over these tokens.
            trace: A list that takes the input of every block, and the result.

        Returns:
            Final hidden states ``[b t d]``.
        """
        before, states = cache.states_before(len(self.layers), x.shape[0]), []
        position = None if before[0] is None else before[0].position
        x = self._scale_and_position(x, position, keep, segments)
        trace = [] if trace is None else trace
        method = self.method if use_cache else self.method.without_state()
        values: Tensor | None = None
        embeddings = x if len(self.shared) else None
        for block, state in zip(self.layers, before, strict=True):
            trace += [x]
            x, state, values = block(x, state, keep, segments, method, values, embeddings)
            states += [state] if use_cache else []
        if use_cache:
            cache.advance(states, x.shape[1])
        x = self.norm(x)
        trace += [x]
        return x

    def _scale_and_position(
        self, x: Embedded, before: Tensor | None, keep: Mask | None, segments: Segments | None
    ) -> Embedded:
        if self.embed_positions is None:
            return self.place(x, None)
        past = TokenContext(x, None, before, keep, segments, self.method.neighbours)
        return self.place(x, past.positions)

    def place(self, x: Embedded, positions: Tensor | None) -> Embedded:
        """Return vectors ``[b t d]`` as the first block reads them: scaled, with the embeddings of
        their positions ``[b t]`` if the model has learnt any.
        """
        if self.embed_positions is not None and positions is not None:
            known = self.embed_positions.num_embeddings
            x = x + self.embed_positions(require_positions(positions, known))
        scale = self.config.input_scale
        return self.dropout(x if scale == 1 else x * scale)


@with_both_names
@dataclass
class HiddenStatesOutput(BaseModelOutputWithPast):
    """What a model without its head returns."""


class FastWeightsModel(FastWeightsTrunk):
    """A language model without its head: token ids ``[b t]`` to hidden states ``[b t d]``."""

    embed_tokens: nn.Embedding

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config, nn.Embedding(config.vocab_size, config.hidden_size))
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
        position_ids: Tensor | None = None,
        cache: FastWeightsCache | None = None,
        **boundaries: Unpack[Boundaries],
    ) -> HiddenStatesOutput:
        """Compute the final hidden state of every token.

        Args:
            input_ids: ``[b t]``; give either these or `inputs_embeds`.
            attention_mask: ``[b t]``, or ``[b s+t]`` with the s tokens that the cache has seen;
                1 marks a token, 0 padding on either side.
            past_key_values: The cache to continue from, advanced in place. With `use_cache` and
                None, a new one is made.
            inputs_embeds: ``[b t d]`` in place of `input_ids`, before they are scaled.
            use_cache: Whether to return a cache. None: `config.use_cache`, but False in training
                and for a model that reads both ways.
            segments: ``[b t]`` integers; where they change, a packed document begins, with an
                empty memory.
            output_hidden_states: Whether to return every block's input as well.
            position_ids: ``[b t]`` or ``[1 t]``, how many tokens of its document come before each
                token, padding not counted. A document begins at every 0, with an empty memory; no
                other number changes anything, and on the CPU one that is not the model's own count
                is refused.
            cache: Another name of `past_key_values`, transformers' own from 5.24 on.
            boundaries: The names of `Boundaries`, by which collators tell documents apart, too.

        Returns:
            `last_hidden_state` ``[b t d]``, `past_key_values` and `hidden_states`.

        Raises:
            TypeError: An argument is not known, or not of its type.
            ValueError: Inputs do not fit each other, the vocabulary or the cache.
        """
        if output_attentions:
            raise ValueError("there are no attentions to output; see Recurrence.attention_map()")
        x = self._embeddings(input_ids, inputs_embeds)
        use_cache = self._resolve_use_cache(use_cache)
        given = one_cache(past_key_values=past_key_values, cache=cache)
        cache = require_cache(given)
        if self.method.neighbours is None:
            tokens = tokens_of_sequences(
                x, attention_mask, cache, segments, position_ids, boundaries
            )
        else:
            require_divided(position_ids=position_ids, cache=given, **boundaries)
            tokens = tokens_of_slice(x, attention_mask, segments)
        trace = [] if output_hidden_states else None
        x = self._read(tokens, cache, use_cache=use_cache, trace=trace)
        return HiddenStatesOutput(
            last_hidden_state=x,
            hidden_states=None if trace is None else tuple(trace),
            **cache_argument(cache if use_cache else None),
        )

    def _read(
        self,
        tokens: Tokens,
        cache: FastWeightsCache,
        *,
        use_cache: bool,
        trace: list[Embedded] | None,
    ) -> Embedded:
        """`run_blocks` on `tokens`, which the cache may have to take back some of, and before them
        on those that it has taken back to.
        """
        if not cache.records:
            return self._run(tokens, cache, use_cache=use_cache, trace=trace)
        old = 0 if cache.unread is None else cache.unread.length
        ahead = tokens if cache.unread is None else tokens.after(cache.unread)
        traces: list[list[Embedded]] = []
        for part in cache.record(tokens) if use_cache else [ahead]:
            traces.append([])
            self._run(part, cache, use_cache=use_cache, trace=traces[-1])
        whole = [torch.cat(xs, 1)[:, old:] for xs in zip(*traces, strict=True)]
        if trace is not None:
            trace += whole
        return whole[-1]

    def _run(
        self,
        tokens: Tokens,
        cache: FastWeightsCache,
        *,
        use_cache: bool,
        trace: list[Embedded] | None,
    ) -> Embedded:
        """`run_blocks` on `tokens`; a document that begins with them forgets what `cache` holds."""
        apart = len(cache) > 0 and tokens.begins_anew
        tokens = tokens.behind_padding() if apart else tokens
        x = self.run_blocks(
            tokens.x, tokens.keep, tokens.segments, cache, use_cache=use_cache, trace=trace
        )
        if not apart:
            return x
        cache.tokens -= use_cache
        if trace is not None:
            trace[:] = [vectors[:, 1:] for vectors in trace]
        return x[:, 1:]

    def _resolve_use_cache(self, wanted: bool | None) -> bool:
        if wanted and self.config.bidirectional:
            raise ValueError(
                "use_cache = True, but a model that reads both ways cannot go on; leave it out"
            )
        sliced = self.method.neighbours is not None
        if wanted and sliced:
            raise ValueError(
                f"use_cache = True, but by {self.method} a process reads a slice, behind which"
                " nobody goes on; leave it out"
            )
        alone = not (self.training or self.config.bidirectional or sliced)
        return self.config.use_cache and alone if wanted is None else wanted

    def _embeddings(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Embedded:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            x = self.embed_tokens(require_ids(input_ids, self.embed_tokens.num_embeddings))
        else:
            x = require_embeddings(inputs_embeds, self.embed_tokens)
        if x.shape[1] == 0:
            raise ValueError("there are no tokens; begin an empty prompt with the bos token")
        return x


class FastWeightsForCausalLM(
    BatchesAtOnce,
    GeneratesByEitherName,
    GeneratesNatively,
    FastWeightsPreTrainedModel,
    GenerationMixin,
):
    """A causal language model of any mixers: `FastWeightsModel` and a linear head.

    Works with transformers' ``generate``, Trainer, PEFT and pipelines. The head shares the
    embeddings' weights if `config.tie_word_embeddings`. Training, padding and packed documents:
    see `forward`; decoding in constant memory: `fastweights.stream`.

    Raises:
        ValueError: `config.bidirectional`, as a language model must not see what it predicts.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: FastWeightsConfig) -> None:
        if config.bidirectional:
            raise ValueError(
                "bidirectional = True, but a language model must not see the tokens it is to"
                " predict"
            )
        super().__init__(config)
        self.model = FastWeightsModel(config)
        self.lm_head: nn.Linear = Linear(config.hidden_size, config.vocab_size, bias=False)
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
        targets: Tensor | None = None,
        position_ids: Tensor | None = None,
        squared_log_z: bool = False,
        cache: FastWeightsCache | None = None,
        **boundaries: Unpack[Boundaries],
    ) -> LanguageModelOutput:
        """Compute the logits of the next token, and with labels the mean loss.

        The arguments that are not listed here are those of `FastWeightsModel.forward`.

        Args:
            labels: ``[b t]``, as input_ids; −100 is not counted. The shift by one happens here.
                Give the first token of a packed document −100 if the token before it is not to
                predict it.
            targets: ``[b t]`` in place of `labels`: what each token is to predict, without a
                shift. The loss computes logits only where they are not −100.
            logits_to_keep: Return the logits of this many last tokens only (0: of all), or of
                the tokens with these indices.
            num_items_in_batch: What the summed loss is divided by, in place of the number of
                labels.
            skip_logits: Whether to return no logits, so that those of all tokens are never in
                memory at once. None: in training, where there is a loss.
            squared_log_z: Whether to return the mean of log² Z, too, over the tokens whose loss is
                counted (`loss` leaves it out).

        Returns:
            `logits` ``[b t vocab]``, `loss` in nats per token, `past_key_values`,
            `hidden_states` and `squared_log_z`.
        """
        if self.model.method.neighbours is not None:
            require_divided(labels=labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            segments=segments,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            position_ids=position_ids,
            cache=cache,
            return_dict=True,
            **boundaries,
        )
        x = outputs.last_hidden_state
        term = cross_entropy_and_log_z if squared_log_z else cross_entropy
        losses = self._loss(x, labels, targets, num_items_in_batch, term)
        loss, log_z = losses if losses is not None and squared_log_z else (losses, None)
        skip_logits = self.training and loss is not None if skip_logits is None else skip_logits
        span = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return LanguageModelOutput(
            loss=loss,
            logits=None if skip_logits else self.logits(x[:, span]),
            hidden_states=outputs.hidden_states,
            squared_log_z=log_z,
            **cache_argument(getattr(outputs, CACHE)),
        )

    def logits(self, x: Tensor) -> Tensor:
        """Compute logits ``[… vocab]`` of final hidden states ``[… d]``, capped by
        `config.logit_cap`.
        """
        z, cap = self.lm_head(x), self.config.logit_cap
        return z if cap is None else cap * torch.tanh(z / cap)

    def _loss(
        self,
        x: Embedded,
        labels: Tensor | None,
        shifted: Tensor | None,
        items: Tensor | int | None,
        term: Term,
    ) -> Tensor | None:
        chunk = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if labels is not None and shifted is not None:
            raise ValueError("pass either labels or targets")
        if shifted is not None:
            shifted = require_labels("targets", shifted, self.config.vocab_size)
            kept = select_targets(x, shifted)
            return mean_loss(self.logits, *kept, items=items, chunk=chunk, term=term)
        if labels is None:
            return None
        labels = require_labels("labels", labels, self.config.vocab_size)
        return next_token_loss(self.logits, x, labels, items=items, chunk=chunk, term=term)

    def _prepare_model_inputs(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        given = None if inputs is None else require_token_ids(inputs)
        return base._prepare_model_inputs(given, *args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        tokenizer: object = None,
        assistant_tokenizer: object = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Make the arguments of the next forward of ``generate``, padding on the left.

        Args:
            args: As transformers gives them.
            inputs_embeds: The prompts in place of token ids.
            tokenizer, assistant_tokenizer: What ``stop_strings`` are found with; not read here.
            kwargs: As transformers gives them.
        """
        base: Any = super()
        inputs = base.prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        mask = inputs.get("attention_mask")
        streams = {
            name: inputs[name]
            for name in ("input_ids", "inputs_embeds", "position_ids")
            if inputs.get(name) is not None
        }
        t = next(iter(streams.values())).shape[1]
        if mask is None or t == 1:
            return inputs
        ordered = padding_first(mask[:, -t:], *streams.values())
        return {**inputs, **dict(zip(("attention_mask", *streams), ordered, strict=True))}

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None for ``generate`` to count: the states know how many tokens they have read."""

    def _prefill(
        self, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        base: Any = super()
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.shape == input_ids.shape and config.prefill_chunk_size:
            model_kwargs["attention_mask"], input_ids = padding_first(mask, input_ids)
        return base._prefill(input_ids, config, model_kwargs, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={wanted!r} does not exist for {type(self).__name__}, whose"
                " cache is a FastWeightsCache of constant size per recurrent layer; leave it out"
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            cache = model_kwargs[CACHE] = FastWeightsCache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
        else:
            base: Any = super()
            base._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
