"""Where a model attends: found by one forward of two tokens through a probe, not by the names of
modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface

PROBE = "linearize_probe"
REPLACEABLE = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__)
"""Layers of a cache that hold keys and values alone."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of a model, as its attention function sees it: after projections, norms and
    RoPE.

    Attributes:
        scaling: what scores q·k are multiplied by
        window: of a sliding window, else None
        softcap: scores s become softcap · tanh(s / softcap), else None
        sinks: whether the softmax has weights beside those of its keys
        chunked: whether tokens see only their own chunk
        causal: whether tokens see only those before them
        masked: whether its mask comes from transformers' mask interface as it is
        calls: how often the layer attends in one forward
        cached: what a cache keeps for the layer
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
        """Whether its part of the cache is more, or less, than its keys and values."""
        return self.cached not in REPLACEABLE

    @property
    def refusal_reason(self) -> str | None:
        """Why this layer cannot be converted; None if it can."""
        reasons = {
            "attention sinks, weights that belong to no key, have no counterpart in the linear form": (
                self.sinks
            ),
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


class _Probe:
    """What a forward pass with the probe finds: `sites`, and the masks that transformers made for
    it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.sites: list[AttentionLayer] = []
        self.masks: list[Any] = []
        self.paths = {module: path for path, module in model.named_modules()}
        self.layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers

    def mask(self, **options: Any) -> Any:
        self.masks.append(AttentionMaskInterface()["eager"](**options))
        return self.masks[-1]

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Takes notes, and returns zeros."""
        masked = any(attention_mask is mask for mask in self.masks)
        self.sites.append(self._site(module, query, key, value, masked, options))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def _site(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, masked: bool, options: dict[str, Any]
    ) -> AttentionLayer:
        scaling, layer = options.get("scaling"), module.layer_idx
        return AttentionLayer(
            layer=layer,
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
            cached=(
                type(self.layers[layer]).__name__
                if layer < len(self.layers)
                else "cache of other layers"
            ),
        )


def _layer_type(module: Any) -> str | None:
    types = getattr(module.config, "layer_types", None)
    return None if types is None else types[module.layer_idx]


def find_attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """The attentions of `model` in the order of its layers; [] if none goes through transformers'
    interface.

    Also of a model on the meta device (mixtures of experts: in bfloat16, as their grouped products
    ask for).
    """
    probe, training = _Probe(model), model.training
    AttentionInterface.register(PROBE, probe.attention)
    AttentionMaskInterface.register(PROBE, probe.mask)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with use_implementation(model, PROBE), torch.no_grad():
            model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        model.train(training)
        AttentionInterface._global_mapping.pop(PROBE)
        AttentionMaskInterface._global_mapping.pop(PROBE)
    calls = Counter(site.path for site in probe.sites)
    once = {site.path: replace(site, calls=calls[site.path]) for site in probe.sites}
    return sorted(once.values(), key=lambda site: site.layer)


@contextmanager
def use_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside the block all attentions of `model` go through the implementation registered as
    `name`.
    """
    configs = configurations(model)
    before = [config._attn_implementation_internal for config in configs]
    set_implementation(configs, name)
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation_internal = old


def set_implementation(configs: list[Any], name: str) -> None:
    for config in configs:
        config._attn_implementation_internal = name


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration that a module of `model` reads."""
    held = (getattr(module, "config", None) for module in model.modules())
    return list(
        {id(config): config for config in held if isinstance(config, PretrainedConfig)}.values()
    )
