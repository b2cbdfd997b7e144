"""The attention layers of a model, found by a forward pass of two tokens instead of by modules'
names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fastweights.linearize.convert.transformers_seams import (
    cache_layer_names,
    configurations,
    set_implementation,
    softmax_mask,
    temporary_attention,
    use_implementation,
)
from fastweights.models.evaluation import evaluation_mode

PROBE = "linearize_probe"
REPLACEABLE = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__)
"""Layers of a cache that hold keys and values alone."""


PREFIX = "linearized_"
SOFTMAX = ("sdpa", "eager")
"""The softmax attentions that unconverted layers and teachers can use."""


class CannotLinearize(ValueError):  # noqa: N818
    """A model, a layer or a call cannot be linearized; the message says why, and what to do.

    Attributes:
        what: What was asked for.
        why: Why it is not possible.
        fix: What to do instead.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what, self.why, self.fix = what, why, fix

    def __reduce__(self) -> tuple[type[CannotLinearize], tuple[str, str, str]]:
        return type(self), (self.what, self.why, self.fix)


@dataclass(frozen=True)
class AttentionLayer:
    """A description of one attention of a model, as its attention function sees it.

    That is after projections, norms and rotary positions. Plain data, kept in the model's
    ``config.json``.

    Attributes:
        layer: The layer's number.
        path: The attention module's name in the model, such as "model.layers.0.self_attn".
        heads: Number of query heads.
        kv_heads: Number of key heads, a divisor of `heads`.
        head_dim: Channels of a query and of a key.
        value_dim: Channels of a value.
        scaling: What scores q·k are multiplied by.
        window: Tokens of its sliding window; None if it has none.
        softcap: Scores s become softcap · tanh(s / softcap); None if they stay as they are.
        sinks: Whether the softmax has weights besides those of its keys.
        chunked: Whether tokens see only their own chunk.
        causal: Whether tokens see only those before them.
        masked: Whether its mask comes unchanged from transformers' mask interface.
        calls: How often the layer attends in one forward pass.
        cached: The class of what a cache keeps for the layer.
    """

    layer: int
    path: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunked: bool = False
    causal: bool = True
    masked: bool = True
    calls: int = 1
    cached: str = DynamicLayer.__name__

    @property
    def shares(self) -> bool:
        """Whether its part of the cache holds more, or less, than its own keys and values."""
        return self.cached not in REPLACEABLE

    def zeros(self, tokens: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[1 t h ·]`` of so many tokens, all of them 0."""
        q = torch.zeros(1, tokens, self.heads, self.head_dim, dtype=dtype)
        v = torch.zeros(1, tokens, self.kv_heads, self.value_dim, dtype=dtype)
        return q, q.new_zeros(1, tokens, self.kv_heads, self.head_dim), v

    @property
    def refusal_reason(self) -> str | None:
        """Why this layer cannot be converted; None if it can."""
        reasons = {
            "attention sinks, weights that belong to no key, have no counterpart in the linear"
            " form": self.sinks,
            "chunked attention hides its chunks from the attention function": self.chunked,
            "tokens also see those after them, a state only those before": not self.causal,
            "its mask is not transformers' own, so that it is unknown who sees whom": (
                not self.masked
            ),
            f"it attends {self.calls} times, with one cache": self.calls > 1,
            f"transformers keeps a {self.cached} for it, not its own keys and values alone": (
                self.shares
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def skip_reason(self) -> str | None:
        """Why this layer stays as it is unless it is asked for; None if it is converted."""
        if self.window is not None and self.refusal_reason is None:
            return f"its sliding window of {self.window} tokens already takes constant memory"
        return self.refusal_reason


def find_attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """List the attentions of a model in the order of its layers.

    Runs one forward pass of two tokens in which every attention records its arguments instead of
    attending. Weights are not read, so that a model on the meta device will do (mixtures of experts
    must be in bfloat16, which their grouped products require).

    Args:
        model: Any model of transformers; it is left as it was.

    Returns:
        One record for each attention that uses transformers' attention interface; [] if none does.
        `AttentionLayer.skip_reason` says why one is not converted by default.
    """
    probe = _AttentionProbe(model)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with (
        temporary_attention(PROBE, probe.attend, probe.make_mask),
        use_implementation(model, PROBE),
        evaluation_mode(model),
    ):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    calls = Counter(attention.path for attention in probe.found)
    by_path = {a.path: replace(a, calls=calls[a.path]) for a in probe.found}
    return sorted(by_path.values(), key=lambda attention: attention.layer)


class _AttentionProbe:
    """What a forward pass with the probe finds: the attentions, and the masks that transformers
    made for them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.found: list[AttentionLayer] = []
        self.masks: list[Any] = []
        self.paths = {module: path for path, module in model.named_modules()}
        self.cache_layers = cache_layer_names(model.config)

    def make_mask(self, **options: Any) -> Any:
        """The mask function: transformers' own mask, remembered."""
        self.masks.append(softmax_mask("eager")(**options))
        return self.masks[-1]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The attention function: takes notes, and returns zeros."""
        masked = any(attention_mask is mask for mask in self.masks)
        self.found.append(self._describe(module, query, key, value, masked, options))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def _describe(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, masked: bool, options: dict[str, Any]
    ) -> AttentionLayer:
        scaling = options.get("scaling")
        return AttentionLayer(
            layer=module.layer_idx,
            path=self.paths[module],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            scaling=q.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux") is not None,
            chunked=_layer_type(module) == "chunked_attention",
            causal=options.get("is_causal") is not False and getattr(module, "is_causal", True),
            masked=masked,
            cached=self._cache_layer_name(module.layer_idx),
        )

    def _cache_layer_name(self, layer: int) -> str:
        """What a cache keeps for a layer."""
        known = layer < len(self.cache_layers)
        return self.cache_layers[layer] if known else "cache of other layers"


def _layer_type(module: Any) -> str | None:
    types = getattr(module.config, "layer_types", None)
    return None if types is None else types[module.layer_idx]


def implementation_name(softmax: str) -> str:
    """Return the name of the attention implementation of a linearized model.

    Args:
        softmax: The implementation that its softmax layers use, one of `SOFTMAX`.
    """
    return PREFIX + softmax


def softmax_name(implementation: str | None) -> str:
    """Return the softmax implementation that a name, with our prefix or without it, stands for.

    Raises:
        CannotLinearize: If it is none of `SOFTMAX`.
    """
    name = str(implementation).removeprefix(PREFIX)
    if name not in SOFTMAX:
        raise CannotLinearize(
            f"attn_implementation={name!r}",
            "softmax layers beside linear ones go through sdpa or eager",
            "load the model with attn_implementation='sdpa', which takes the fused kernels"
            " there are",
        )
    return name


def use_softmax(model: PreTrainedModel, softmax: str) -> None:
    """Let the softmax layers and the teacher of a linearized model use the implementation
    `softmax`."""
    set_implementation(configurations(model), implementation_name(softmax))
