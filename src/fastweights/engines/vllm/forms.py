"""What the mixers of a model keep of a sequence, known before there is a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.vllm.layout import PageLayout, StateForm
from fastweights.layers import LayerStream
from fastweights.mixer import Mixer, MixerState
from fastweights.models import FastWeightsConfig
from fastweights.recurrence import Softmax
from fastweights.recurrence.base import NoFiniteFormError


@dataclass(frozen=True)
class KeptState:
    """What a mixer keeps: as much after any number of tokens.

    Attributes:
        form: How a `MixerState` is made of the tensors.
        layout: Where these stand in a page.
    """

    form: StateForm
    layout: PageLayout


@dataclass(frozen=True)
class KeptKeys:
    """What a softmax mixer without a window keeps: the keys and values of all tokens.

    Attributes:
        heads: Of queries.
        groups: Of keys and values.
        keys: The width of a key.
        values: The width of a value.
    """

    heads: int
    groups: int
    keys: int
    values: int


Kept = KeptState | KeptKeys


def kept_by(config: FastWeightsConfig, dtype: torch.dtype) -> list[list[Kept]]:
    """What each mixer of each layer keeps of a sequence, computed on the meta device.

    Raises:
        ValueError: If vLLM has no cache for what a mixer keeps.
    """
    if config.shared_blocks:
        raise ValueError(
            "vLLM cannot serve a model with shared_blocks: they read the embeddings at several"
            " depths, and keep a state for each; serve it by `fastweights transformers serve`"
        )
    with torch.device("meta"):
        return [
            [_kept(mixer.to(dtype), layer, dtype) for mixer in config.make_mixers(fields)]
            for layer, fields in enumerate(config.layer_mixers)
        ]


def all_states(kept: list[list[Kept]]) -> Iterator[KeptState]:
    """Those of them that are states."""
    return (one for layer in kept for one in layer if isinstance(one, KeptState))


def all_keys(kept: list[list[Kept]]) -> Iterator[KeptKeys]:
    """Those of them that are keys and values."""
    return (one for layer in kept for one in layer if isinstance(one, KeptKeys))


def longest_page(kept: list[list[Kept]]) -> int:
    """The bytes of the longest page; 0 without states."""
    return max((state.layout.nbytes for state in all_states(kept)), default=0)


@torch.no_grad()
def _kept(mixer: Mixer, layer: int, dtype: torch.dtype) -> Kept:
    x = torch.zeros(1, 1, mixer.d, dtype=dtype)
    read = mixer.project_all(x, stream=LayerStream(x))
    rule: Any = read.recurrence
    try:
        memory = rule.settle(rule.initial_state())
    except NoFiniteFormError as error:
        return _keys(rule, read.past.tails, f"layer {layer}, {type(mixer).__name__}", error)
    state = MixerState(memory, read.past.tails, read.past.position)
    form = StateForm.of(state)
    return KeptState(form, PageLayout.of(form.tensors(state)))


def _keys(rule: Any, tails: dict[str, Tensor], name: str, error: NoFiniteFormError) -> KeptKeys:
    beside = "convolutions, whose tails stand beside the keys" if tails else None
    if not isinstance(rule, Softmax):
        beside = beside or "a rule that is not softmax"
    elif rule.log_decay is not None:
        beside = "a decay of its scores"
    elif rule.sinks is not None:
        beside = "sinks beside its scores"
    if beside:
        raise ValueError(
            f"vLLM cannot serve {name}: {error}; and vLLM's cache of keys and values has no place"
            f" for {beside}. Give the mixer a window, or serve the model by `transformers serve`"
        ) from error
    groups = max(rule.k.shape[2], rule.v.shape[2])
    return KeptKeys(rule.shape[2], groups, rule.k.shape[-1], rule.values)
