"""Low-rank adapters: trained in place of a model's weights, saved by themselves, and merged."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastweights.errors import TrainingError
from fastweights.ranges import FRACTION, POSITIVE_INTEGER, POSITIVE_NUMBER
from fastweights.training.loop.stage import trainable_parameters

FUSED: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("out_proj", "dt_proj")
)
"""By model type: projections whose weights are read directly, past any adapter, by kernels of other
devices if not here."""
TOKENS = 32
"""Of the text that shows which layers gradients reach."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters W + alpha / rank · B A of linear layers (Hu et al., 2021).

    Attributes:
        rank: Rows of A and columns of B.
        alpha: The scale, before it is divided by `rank`.
        dropout: The probability that an input of A is left out.

    Raises:
        TrainingError: If a number is out of its range.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        POSITIVE_INTEGER.require(rank=self.rank)
        POSITIVE_NUMBER.require(alpha=self.alpha)
        FRACTION.require(dropout=self.dropout)


def add_adapters(model: PreTrainedModel, lora: LoRA) -> Any:
    """Put adapters on every linear layer of a model but its head, and return it in peft's wrapper.

    The adapters alone are trained, and whole modules of the names that the model's class lists as
    `trained_beside_adapters`. A starts at random, by torch's generator; B at zero.

    Raises:
        TrainingError: If the model has no linear layer, or peft cannot adapt one.
    """
    from peft import LoraConfig

    named: Any = getattr(model, "trained_beside_adapters", ())
    beside: list[str] = list(named)
    layers = _learning(model, linear_layers(model, beside))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=layers,
        fan_in_fan_out=all(isinstance(model.get_submodule(path), Conv1D) for path in layers),
        modules_to_save=beside or None,
        task_type="CAUSAL_LM",
    )
    return wrap_in_adapters(model, config)


def wrap_in_adapters(model: PreTrainedModel, config: Any) -> Any:
    """Put a model in peft's wrapper, whose configuration is saved in the same order by every
    process: peft keeps the names of layers as a set."""
    from peft import get_peft_model

    with without_notes_to_peft():
        wrapped: Any = get_peft_model(model, config)
    for kept in wrapped.peft_config.values():
        kept.target_modules = sorted(kept.target_modules)
    return wrapped


@contextmanager
def without_notes_to_peft() -> Iterator[None]:
    """Keep back what transformers 5.23 warns of when peft asks a model for
    ``is_gradient_checkpointing``, for the length of a block: who runs this can do nothing about
    it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def linear_layers(model: PreTrainedModel, outside: Iterable[str]) -> list[str]:
    """List the paths of a model's linear layers that can have adapters: all but its head.

    Args:
        model: The model.
        outside: Names of modules whose layers are left out.

    Raises:
        TrainingError: If there are none.
    """
    head, fused = model.get_output_embeddings(), FUSED.get(model.config.model_type, ())
    avoided = {*outside, *fused}
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        if module is not head and avoided.isdisjoint(path.split("."))
    ]
    if not found:
        raise TrainingError(
            f"a {type(model).__name__} has no linear layers that adapters could change; train all"
            " weights, without LoRA"
        )
    return found


def _learning(model: PreTrainedModel, paths: list[str]) -> list[str]:
    """Those of some linear layers whose adapters learn and can be merged; the others are said."""
    apart = without_shared(model, paths)
    reached = _reached(model, apart)
    # which experts a few tokens are sent to says nothing of the others
    found = [path for path in apart if path in reached or "expert" in path]
    _say_left_out(model, apart, found, "are passed by: no gradient reaches what they compute")
    return found


def without_shared(model: nn.Module, paths: list[str]) -> list[str]:
    """Those of some linear layers whose weights no other module has; the others are said."""
    named = model.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in named)
    weights = {path: model.get_submodule(path).get_parameter("weight") for path in paths}
    apart = [path for path, weight in weights.items() if uses[id(weight)] == 1]
    _say_left_out(model, paths, apart, "share their weights, to which each would be added")
    return apart


def _say_left_out(model: nn.Module, paths: list[str], kept: list[str], why: str) -> None:
    left = [path for path in paths if path not in kept]
    if left:
        warnings.warn(
            f"{len(left)} linear layers of a {type(model).__name__} get no adapters, such as"
            f" {left[0]}: they {why}",
            stacklevel=4,
        )


def _reached(model: PreTrainedModel, paths: Iterable[str]) -> set[str]:
    """Those of some layers whose outputs get gradients in a small backward, in which no weight
    does.
    """
    found, trained = set[str](), trainable_parameters(model)
    embeddings: Any = model.get_input_embeddings()
    handles = [embeddings.register_forward_hook(lambda _, __, x: x.requires_grad_().clone())]
    handles += [
        model.get_submodule(path).register_forward_hook(partial(_note_gradient, found, path))
        for path in paths
    ]
    ids = torch.arange(TOKENS, device=model.device)[None] % embeddings.num_embeddings
    was, model_called = model.training, cast(Any, model.eval().requires_grad_(False))
    try:
        with torch.enable_grad():
            model_called(input_ids=ids, use_cache=False).logits.sum().backward()
    finally:
        model.train(was)
        for parameter in trained.values():
            parameter.requires_grad_()
        for handle in handles:
            handle.remove()
    return found


def _note_gradient(found: set[str], path: str, _: object, __: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: found.add(path))


def restore_adapters(model: Any, folder: Path) -> None:
    """Copy the adapters that `model.save_pretrained` wrote to a folder into the same model."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


def merge_adapters(model: Any) -> PreTrainedModel:
    """Add the adapters to the model's weights, and return the model without them."""
    return model.merge_and_unload() if has_adapters(model) else model


@contextmanager
def merged_modules(model: nn.Module) -> Iterator[None]:
    """Put modules of a model's own in the places of peft's, if there are any, for the length of a
    block: linear layers to which adapters are added, and what was trained beside them. Quantised
    layers stay peft's."""
    if not has_adapters(model):
        yield
        return
    places = [
        (parent._modules, name, child, own)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if (own := _merged(child)) is not child
    ]
    for modules, name, _, own in places:
        modules[name] = own
    try:
        yield
    finally:
        for modules, name, child, _ in places:
            modules[name] = child


def _merged(module: Any) -> Any:
    """The module that stands for one of peft's, or `module` itself."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    if not isinstance(module, LoraLayer):
        return module
    layer: Any = module
    base = layer.get_base_layer()
    adding = [name for name in layer.active_adapters if layer.lora_B[name].weight.any()]
    if not (isinstance(base, nn.Linear) and base.weight.is_floating_point()):
        return module
    own = copy(base)
    own._parameters = dict(base._parameters)
    deltas = [layer.get_delta_weight(name) for name in adding]
    if deltas:
        weight = (base.weight.detach() + sum(deltas)).to(base.weight.dtype)
        own.weight = nn.Parameter(weight, requires_grad=False)
    return own


def has_adapters(model: Any) -> bool:
    """Whether a model is in peft's wrapper."""
    if isinstance(model, PreTrainedModel):
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)
