"""What a conversion will do to a model and what it will take, found out without its weights."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fastweights.linearize.convert.attach import choose_layers
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.sites import AttentionLayer, find_attention_layers
from fastweights.linearize.distill.baselines import LinearizationMethod

ADAM = 4 * 4
"""Bytes per trained parameter in float32: itself, its gradient, and AdamW's two averages."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion in numbers; bytes are of one sequence unless they are of weights.

    parameters        of the model, without the branches branch, adapter   trained parameters of
    stage one and of stage two state             bytes of the converted layers' states and windows,
    full and constant from then on cache_per_token   bytes of keys and values that the same layers
    keep of a token now weights, training bytes of the weights, and of what training adds to them
    but for activations seconds           of both stages on this machine's CPU, from the speed of a
    matrix product; none without a stage
    """

    model_type: str
    parameters: int
    converted: tuple[AttentionLayer, ...]
    left: tuple[tuple[int, str], ...]
    branch: int
    adapter: int
    state: int
    cache_per_token: int
    weights: int
    training: int
    seconds: dict[str, float]

    @property
    def break_even(self) -> int:
        """The length in tokens from which on the state is smaller than the cache was."""
        return -(-self.state // self.cache_per_token)


def plan(
    source: str | PreTrainedModel,
    method: LinearizationMethod = LinearizationMethod(),
    *,
    layers: Iterable[int] | None = None,
    length: int = 1024,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """For a model, a folder or a name on the hub, of which only the configuration is read.

    length  tokens per sequence, of training
    dtype   of the weights; None: as the configuration has it, or float32
    Raises CannotLinearize where `linearize` would.
    """
    model = (
        source
        if isinstance(source, PreTrainedModel)
        else _skeleton(AutoConfig.from_pretrained(source), dtype)
    )
    chosen = choose_layers(model, None if layers is None else list(layers))
    numbers = {site.layer for site in chosen}
    left = [
        (s.layer, s.skip_reason or "not chosen")
        for s in find_attention_layers(model)
        if s.layer not in numbers
    ]
    parameters, size = sum(p.numel() for p in model.parameters()), model.dtype.itemsize
    branch = sum(_branch_parameters(site, method) for site in chosen)
    adapter = _adapter_parameters(model, chosen, method)
    return ConversionPlan(
        model_type=model.config.model_type,
        parameters=parameters,
        converted=tuple(chosen),
        left=tuple(left),
        branch=branch,
        adapter=adapter,
        state=sum(_state_bytes(site, method, model.dtype) for site in chosen),
        cache_per_token=sum(
            site.kv_heads * (site.head_dim + site.value_dim) * size for site in chosen
        ),
        weights=parameters * size + branch * 4,
        training=ADAM * max(branch if method.transfer else 0, adapter if method.adapt else 0),
        seconds=_seconds(parameters, method, length),
    )


def _skeleton(config: PretrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype or getattr(config, "dtype", None) or torch.float32
        )


def _branch_parameters(site: AttentionLayer, method: LinearizationMethod) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in method.analog.branch(site).parameters())


def _state_bytes(site: AttentionLayer, method: LinearizationMethod, dtype: torch.dtype) -> int:
    """What the cache holds after as many tokens as the window has."""
    branch, memory, tokens = method.analog.branch(site), StateLayer(), max(1, method.analog.window)
    q, k, v = (
        torch.zeros(1, tokens, heads, width, dtype=dtype)
        for heads, width in (
            (site.heads, site.head_dim),
            (site.kv_heads, site.head_dim),
            (site.kv_heads, site.value_dim),
        )
    )
    with torch.no_grad():
        branch(q, k, v, None, None, memory)
    return memory.nbytes


def _adapter_parameters(
    model: PreTrainedModel, sites: Iterable[AttentionLayer], method: LinearizationMethod
) -> int:
    """rank · (inputs + outputs) of every projection; all weights if there are no adapters."""
    if method.adapt is None:
        return 0
    if method.adapt.lora is None:
        return sum(p.numel() for p in model.parameters())
    matrices = [
        p for site in sites for p in model.get_submodule(site.path).parameters() if p.ndim == 2
    ]
    return method.adapt.lora.rank * sum(sum(p.shape) for p in matrices)


def _seconds(parameters: int, method: LinearizationMethod, length: int) -> dict[str, float]:
    """2 operations per parameter and token forward, 4 more backward; a teacher's forward for KL."""
    speed, found = _operations_per_second(), dict[str, float]()
    if method.transfer is not None:
        found["transfer"] = 3 * parameters * _tokens(method.transfer.fit, length) / speed
    if method.adapt is not None:
        operations = 6 + (2 if method.adapt.loss.kl else 0)
        found["finetune"] = operations * parameters * _tokens(method.adapt.fit, length) / speed
    return found


def _tokens(fit: Any, length: int) -> int:
    return fit.steps * fit.batch * length


def _operations_per_second(size: int = 768, repeats: int = 4) -> float:
    """Of float32 matrix products on this machine's CPU."""
    matrix = torch.ones(size, size)
    torch.mm(matrix, matrix)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(matrix, matrix)
    return 2 * size**3 * repeats / (time.perf_counter() - start)
