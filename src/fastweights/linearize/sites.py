"""Where a model attends: found by one forward of two tokens through a probe, not by the names of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

PROBE = "linearize_probe"


@dataclass(frozen=True)
class Site:
    """One attention of a model, as its attention function sees it: after projections, norms and RoPE.

    scaling   what scores q·k are multiplied by
    window    of a sliding window, else None
    softcap   scores s become softcap · tanh(s / softcap), else None
    sinks     whether the softmax has weights beside those of its keys
    chunked   whether tokens see only their own chunk
    causal    whether tokens see only those before them
    masked    whether its mask comes through transformers' mask interface
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

    @property
    def refused(self) -> str | None:
        """Why this layer cannot be converted; None if it can."""
        if self.sinks:
            return "attention sinks, weights that belong to no key, have no counterpart in the linear form"
        if self.chunked:
            return "chunked attention hides its chunks from the attention function"
        if not self.causal:
            return "tokens also see those after them, a state only those before"
        if not self.masked:
            return "its mask does not come through transformers' mask interface, so that padding is unknown"
        return None

    @property
    def skipped(self) -> str | None:
        """Why this layer stays as it is unless it is asked for; None if it is converted."""
        if self.window is not None and self.refused is None:
            return f"its sliding window of {self.window} tokens already takes constant memory"
        return self.refused


class _NoMask:
    """What the probe's masks are, so that an attention can be seen to use them."""


NO_MASK = _NoMask()


def _probe_mask(*_: Any, **__: Any) -> _NoMask:
    return NO_MASK


def _probe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of the probe: takes notes in `module.linear_sites`, returns zeros."""
    found: list[Site] = module.linear_sites
    found.append(_site(module, query, key, value, attention_mask, options))
    shape = query.shape[0], query.shape[2], query.shape[1], value.shape[3]
    return query.new_zeros(shape), None


def _site(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Site:
    scaling = options.get("scaling")
    sliding = options.get("sliding_window")
    return Site(
        layer=module.layer_idx,
        path=module.linear_path,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        scaling=q.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux") is not None,
        chunked=_layer_type(module) == "chunked_attention",
        causal=options.get("is_causal") is not False and getattr(module, "is_causal", True),
        masked=mask is NO_MASK,
    )


def _layer_type(module: Any) -> str | None:
    types = getattr(module.config, "layer_types", None)
    return None if types is None else types[module.layer_idx]


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, _probe_mask)


def find_sites(model: PreTrainedModel) -> list[Site]:
    """The attentions of `model` in the order of its layers; [] if none goes through transformers' interface.

    Also of a model on the meta device (mixtures of experts: in bfloat16, as their grouped products ask for).
    """
    found: list[Site] = []
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with _probing(model, found), torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return sorted(found, key=lambda site: site.layer)


@contextmanager
def _probing(model: PreTrainedModel, found: list[Site]) -> Iterator[None]:
    training = model.training
    modules = [(path, module) for path, module in model.named_modules() if _has_layer(module)]
    for path, module in modules:
        object.__setattr__(module, "linear_sites", found)
        object.__setattr__(module, "linear_path", path)
    try:
        with implementation(model, PROBE):
            yield
    finally:
        model.train(training)
        for _, module in modules:
            del module.linear_sites, module.linear_path


def _has_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and isinstance(
        getattr(module, "config", None), PretrainedConfig
    )


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside the block all attentions of `model` go through the implementation registered as `name`."""
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
    return list({id(config): config for config in held if isinstance(config, PretrainedConfig)}.values())
