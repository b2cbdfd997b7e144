"""The attention function that transformers calls for a linearized model, and what it finds on a
layer: the branch, the mode and the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from fastweights.layers import Linear
from fastweights.linearize.convert.attention_layers import (
    SOFTMAX,
    AttentionLayer,
    CannotLinearize,
    implementation_name,
)
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import ensure_state_layer, require_keys_and_values
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.masks import ForwardMasks, make_masks
from fastweights.linearize.convert.modes import AttentionCall, Mode, Student
from fastweights.linearize.convert.rules import branch_of
from fastweights.linearize.convert.transformers_seams import (
    attach_branch,
    attentions_with_branch,
    caches_among,
    change_class,
    execution_device,
    hide_positions,
    position_ids_among,
    register_attention,
    softmax_attention,
)


def attend(
    softmax: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a linearized layer; transformers calls it as its attention function.

    Args:
        softmax: The softmax implementation of the model, one of `SOFTMAX`.
        module: The layer's attention module.
        query: ``[b h t k]``.
        key: ``[b g t k]``.
        value: ``[b g t v]``.
        attention_mask: What `make_masks` returned.
        options: Further arguments of transformers' attention functions.

    Returns:
        The output ``[b t h v]``, and attention weights or None.

    Raises:
        CannotLinearize: If a linear layer gets a mask that `make_masks` did not make.
    """
    branch = getattr(module, "linear_branch", None)
    masks = attention_mask if isinstance(attention_mask, ForwardMasks) else None
    if branch is None and not module.training:
        query = scale_scores(module, query, options)
    given = partial(softmax_attention(softmax, module), module, query, key, **options)
    if branch is None:
        return given(value, attention_mask if masks is None else masks.softmax)
    if masks is None:
        raise CannotLinearize(
            f"layer {module.layer_idx} with a mask of shape {_shape(attention_mask)}",
            "a state cannot tell which token sees which",
            "pass attention_mask [batch, time], 1 for tokens and 0 for padding, or none",
        )
    memory, module.linear_memory = module.linear_memory, None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    keep, segments = masks.keep, masks.segments
    positions = masks.unusual(position_ids_among(options))
    if positions is not None:
        kept = None if memory is None else memory.state
        q, k = branch.align(q, k, positions.expand(len(q), -1), keep, segments, kept)
    call = AttentionCall(
        layer=module.layer_idx,
        branch=branch,
        q=q,
        k=k,
        v=v,
        keep=keep,
        segments=segments,
        kept=masks.given,
        record=lambda: branch.record(q, k, v, keep, segments),
        linear=lambda replacement=None: branch(q, k, v, keep, segments, memory, replacement),
        softmax=lambda values=v: given(values.transpose(1, 2), masks.softmax)[0],
    )
    return module.linear_mode.attend(call).contiguous(), None


def scale_scores(module: Any, query: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Multiply queries ``[b h t k]`` of a layer without positions by log_a(t + a) (HyPE)."""
    base = getattr(module, "linear_log_scale", 0)
    if not base:
        return query
    positions = position_ids_among(options)
    assert positions is not None, "a layer whose positions are hidden is told of them"
    scale = (positions + base).log() / math.log(base)
    return query * scale[:, None, :, None].to(query.dtype)


def _shape(mask: Any) -> Any:
    return list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__


def take_memory(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the layer's part of the cache on the attention module, before each of its forwards.

    Attention functions do not get the cache; this pre-hook finds it among the module's arguments.
    """
    module.linear_memory = None
    for cache in caches_among(args, kwargs):
        if module.linear_mode.constant:
            module.linear_memory = ensure_state_layer(cache, module.layer_idx)
        else:
            require_keys_and_values(cache, module.layer_idx)


def attention_at(model: PreTrainedModel, path: str) -> nn.Module:
    """Return the attention that `path` names in one of the models of a family.

    The models with a head hold the one without a head under its ``base_model_prefix``.
    """
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules())
    names = path, path.removeprefix(prefix), prefix + path
    return next(modules[name] for name in names if name in modules)


def install_branches(
    model: PreTrainedModel, attentions: Iterable[AttentionLayer], config: LinearAttentionConfig
) -> None:
    """Give each of these attentions of `model` a new branch, on the device of its weights, if it
    has none, and let its projections multiply as ours do."""
    _multiply_by(model, Linear)
    for attention in attentions:
        module = attention_at(model, attention.path)
        if not hasattr(module, "linear_branch"):
            branch = branch_of(config, attention).to(execution_device(module))
            attach_branch(module, branch, Student(), take_memory)
    if config.positions == "linear":
        _hide_positions(model, config.log_scale)


def _hide_positions(model: PreTrainedModel, log_scale: int) -> None:
    """Take rotary positions away from the attentions that stay softmax over all tokens."""
    for module in softmax_attentions(model):
        if not hasattr(module, "linear_log_scale"):
            try:
                hide_positions(module)
            except LookupError as error:
                raise CannotLinearize(
                    f"{type(model).__name__} with positions = 'linear'",
                    f"{error}, so that its positions cannot be taken away",
                    "take positions = 'everywhere'",
                ) from error
            module.linear_log_scale = log_scale


def softmax_attentions(model: nn.Module) -> list[Any]:
    """Return the attentions of a linearized model that stay softmax over all tokens."""
    kinds = tuple({type(module) for module in attentions_with_branch(model)})
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        and not hasattr(module, "linear_branch")
        and getattr(module, "sliding_window", None) is None
    ]


def branches(model: nn.Module) -> dict[int, LinearBranch]:
    """Return the linear branches of a linearized model.

    Args:
        model: The model, or peft's wrapper around it; where its adapters train copies of the
            branches, those of the active adapter are returned.

    Returns:
        The modules by the number of their layer, in order.
    """
    return {
        module.layer_idx: _active(module.linear_branch) for module in attentions_with_branch(model)
    }


def _active(branch: Any) -> LinearBranch:
    """peft keeps trained copies (``modules_to_save``) in a wrapper."""
    return (
        branch
        if isinstance(branch, LinearBranch)
        else branch.modules_to_save[branch.active_adapters[0]]
    )


def _multiply_by(model: nn.Module, kind: type[nn.Linear]) -> None:
    """Make the linear layers of `model` that are torch's or ours this `kind`."""
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            change_class(module, kind)


@contextmanager
def use_mode(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Set what every converted layer of a model computes, for the length of a block. Where it keeps
    all keys and values, the model's own projections multiply as in the model it was made from, too.

    Args:
        model: A linearized model, or a wrapper around it.
        mode: The mode, such as ``Teacher()``, which gives the original softmax model.
    """
    layers = attentions_with_branch(model)
    before = [layer.linear_mode for layer in layers]
    for layer in layers:
        layer.linear_mode = mode
    _multiply_by(model, Linear if mode.constant else nn.Linear)
    try:
        yield
    finally:
        _multiply_by(model, Linear if all(old.constant for old in before) else nn.Linear)
        for layer, old in zip(layers, before, strict=True):
            layer.linear_mode = old


for _softmax in SOFTMAX:
    register_attention(
        implementation_name(_softmax), partial(attend, _softmax), partial(make_masks, _softmax)
    )


def attend_all(model: PreTrainedModel, inputs: Mapping[str, Tensor], mode: Mode) -> None:
    """Run a forward pass through all layers in a mode, without logits.

    Gradients are recorded only where the mode asks for them.
    """
    with torch.no_grad(), use_mode(model, mode):
        read_all(model, inputs)


def read_all(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """Run a forward pass through all layers, without logits."""
    # Of a divided model the parts are brought together by a call of the whole.
    called: Any = model if isinstance(model, FSDPModule) else model.base_model
    called(**inputs, use_cache=False)


def aligned_layers(model: nn.Module, blocks: bool) -> dict[int, str]:
    """Return the paths of what is compared in a linearized model, by the number of the layer.

    Args:
        model: The model.
        blocks: Whether these are its blocks, or else their attentions.
    """
    with_branch = {id(module): module.layer_idx for module in attentions_with_branch(model)}
    found = {
        with_branch[id(module)]: path
        for path, module in model.named_modules()
        if id(module) in with_branch
    }
    return {
        layer: block_of(model, path) if blocks else path for layer, path in sorted(found.items())
    }


def blocks(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a linearized model: the module list that holds the attentions, an empty
    one where none does."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return next((m for m in lists if attentions_with_branch(m)), nn.ModuleList())


def block_of(model: nn.Module, path: str) -> str:
    """Return the path of the block that a module is in.

    Raises:
        ValueError: If it is in none.
    """
    parts = path.split(".")
    for end in range(1, len(parts) - 1):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    raise ValueError(
        f"{path} of a {type(model).__name__} is in no list of blocks; take a recipe that compares"
        " attentions, and trains all weights or adapters"
    )
