"""A preview of a conversion, computed without the model's weights: what it changes and what it
costs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fastweights.linearize.convert.attention_layers import AttentionLayer, find_attention_layers
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.conversion import choose_layers, require_softmax
from fastweights.linearize.convert.registry import branch_of
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.methods import LinearizationMethod

ADAM = 4 * 4
"""Bytes per trained parameter in float32: itself, its gradient, and AdamW's two averages."""


@dataclass(frozen=True)
class ConversionPlan:
    """The numbers of a planned conversion; bytes are per sequence, unless they are of weights.

    Attributes:
        model_type: Type of the softmax model, such as "llama".
        parameters: Number of the model's parameters, without the branches.
        converted: The attentions that become linear.
        left: The layers that stay softmax, each with the reason.
        branch: Number of parameters that stage one trains.
        adapter: Number of parameters that stage two trains.
        state: Bytes of the converted layers' states and windows, when full; they stay constant
            then.
        cache_per_token: Bytes of keys and values that the same layers keep per token before
            conversion.
        weights: Bytes of the weights.
        training: Bytes that training needs besides them, without activations.
        seconds: A rough estimate of how long each stage takes on this machine's CPU, by its name;
            see `plan`.
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
        """The number of tokens from which on the state is smaller than the cache was."""
        return -(-self.state // self.cache_per_token)


def plan(
    source: str | PreTrainedModel,
    method: LinearizationMethod = LinearizationMethod(),
    *,
    layers: Iterable[int] | None = None,
    length: int = 1024,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Compute what a conversion changes in a model and what it costs, without loading the weights.

    The seconds are a rough estimate: operations counted from the parameters, divided by the speed
    of a large float32 matrix product that is timed here and now. Attention, the data, other loads
    of the machine and GPUs are left out; expect the order of magnitude.

    Args:
        source: A model, a folder or a name on the Hugging Face hub; only the configuration is read.
        method: What replaces softmax attention, and how it is trained.
        layers: Numbers of the layers to convert; None for all that are converted by default.
        length: Tokens per training sequence.
        dtype: Dtype of the weights; None for the configuration's, or float32.

    Raises:
        CannotLinearize: If `linearize` would raise it.
    """
    model = source if isinstance(source, PreTrainedModel) else _skeleton(source, dtype)
    chosen = choose_layers(model, None if layers is None else list(layers))
    parameters = sum(p.numel() for p in model.parameters())
    branch = sum(_branch_parameters(attention, method) for attention in chosen)
    adapter = _adapter_parameters(model, chosen, method)
    return ConversionPlan(
        model_type=model.config.model_type,
        parameters=parameters,
        converted=tuple(chosen),
        left=_layers_left(model, chosen),
        branch=branch,
        adapter=adapter,
        state=sum(_state_bytes(attention, method, model.dtype) for attention in chosen),
        cache_per_token=sum(_key_value_bytes(attention, model.dtype) for attention in chosen),
        weights=parameters * model.dtype.itemsize + branch * torch.float32.itemsize,
        training=ADAM * max(branch if method.transfer else 0, adapter if method.adapt else 0),
        seconds=_guess_seconds(parameters, method, length),
    )


def _layers_left(
    model: PreTrainedModel, chosen: Iterable[AttentionLayer]
) -> tuple[tuple[int, str], ...]:
    """The layers that stay softmax, and why."""
    numbers = {attention.layer for attention in chosen}
    return tuple(
        (attention.layer, attention.skip_reason or "not chosen")
        for attention in find_attention_layers(model)
        if attention.layer not in numbers
    )


def _key_value_bytes(attention: AttentionLayer, dtype: torch.dtype) -> int:
    """What a cache of softmax keeps of one token."""
    return attention.kv_heads * (attention.head_dim + attention.value_dim) * dtype.itemsize


def _skeleton(source: str, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model without memory for its weights."""
    config = AutoConfig.from_pretrained(source)
    require_softmax(config, f"{source} ({config.model_type})")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype or getattr(config, "dtype", None) or torch.float32
        )


def _branch_parameters(attention: AttentionLayer, method: LinearizationMethod) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in branch_of(method.analog, attention).parameters())


def _state_bytes(attention: AttentionLayer, method: LinearizationMethod, dtype: torch.dtype) -> int:
    """What the cache holds once the window is full.

    Its keys and values grow by the same bytes per token, which small windows tell.
    """
    window, small = method.analog.window, 2
    if window <= small:
        return _cache_bytes(attention, method.analog, dtype)
    two, three = (
        _cache_bytes(attention, replace(method.analog, window=tokens), dtype)
        for tokens in (small, small + 1)
    )
    return two + (window - small) * (three - two)


def _cache_bytes(
    attention: AttentionLayer, analog: LinearAttentionConfig, dtype: torch.dtype
) -> int:
    """What the cache holds after as many tokens as the window and the sinks have."""
    branch, memory = branch_of(analog, attention), StateLayer()
    tokens = max(1, analog.window + analog.sinks)
    q, k, v = (
        torch.zeros(1, tokens, heads, width, dtype=dtype)
        for heads, width in (
            (attention.heads, attention.head_dim),
            (attention.kv_heads, attention.head_dim),
            (attention.kv_heads, attention.value_dim),
        )
    )
    with torch.no_grad():
        branch(q, k, v, None, None, memory)
    return memory.nbytes


def _adapter_parameters(
    model: PreTrainedModel, attentions: Iterable[AttentionLayer], method: LinearizationMethod
) -> int:
    """rank · (inputs + outputs) of every projection; all weights if there are no adapters."""
    if method.adapt is None:
        return 0
    if method.adapt.lora is None:
        return sum(p.numel() for p in model.parameters())
    matrices = [
        p
        for attention in attentions
        for p in model.get_submodule(attention.path).parameters()
        if p.ndim == 2
    ]
    return method.adapt.lora.rank * sum(sum(p.shape) for p in matrices)


def _guess_seconds(parameters: int, method: LinearizationMethod, length: int) -> dict[str, float]:
    """2 operations per parameter and token forward, 4 more backward; a teacher's forward for KL.
    Transfer goes backward through the branches alone, and is counted as half of a forward more.
    """
    speed, found = _speed_of_matrix_products(), dict[str, float]()
    if method.transfer is not None:
        found["transfer"] = 3 * parameters * _tokens(method.transfer.fit, length) / speed
    if method.adapt is not None:
        operations = 6 + (2 if method.adapt.loss.kl else 0)
        found["finetune"] = operations * parameters * _tokens(method.adapt.fit, length) / speed
    return found


def _tokens(fit: Fit, length: int) -> int:
    return fit.steps * fit.batch * length


def _speed_of_matrix_products(size: int = 768, repeats: int = 4) -> float:
    """Operations per second of this machine's CPU on one float32 product of square matrices: the
    best that a layer can do, timed for some milliseconds, whatever else runs meanwhile.
    """
    matrix = torch.ones(size, size)
    torch.mm(matrix, matrix)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(matrix, matrix)
    return 2 * size**3 * repeats / (time.perf_counter() - start)
