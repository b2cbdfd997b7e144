"""Everything here that leans on parts of transformers which it does not promise to keep.

A linearized model stays a model of transformers: its own modules project, normalise and rotate, its
own cache and `generate` are used, ``AutoModelForCausalLM`` loads its checkpoints. That takes a few
handles that transformers has but does not document. Each is one small function below, which says
what it relies on and why; nothing else in the package touches them.
``tests/linearize/test_transformers_seams.py`` asks for every one of them by name, so that a release
that takes one away fails there, and says which. Checked with transformers 5.16.1, 5.23.0 and
5.24.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getsource, signature
from math import inf
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import import_utils

from fastweights.models.cache_names import CACHE
from fastweights.models.checkpoint_code import AUTOMATIC_CLASSES
from fastweights.models.continuation import continuation_of

Attend = Callable[..., tuple[Tensor, Tensor | None]]
MakeMask = Callable[..., Any]

# attention functions ------------------------------------------------------------------------------


def register_attention(name: str, attend: Attend, make_mask: MakeMask) -> None:
    """Have models whose attention implementation is `name` call these two functions.

    Relies on ``AttentionInterface`` and ``masking_utils.AttentionMaskInterface``: the attention of
    every layer is looked up by the configuration's name at each call, and its mask likewise.
    """
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)


@contextmanager
def temporary_attention(name: str, attend: Attend, make_mask: MakeMask) -> Iterator[None]:
    """Register attention as `register_attention` does, for the length of a block.

    Relies on ``_global_mapping`` of both interfaces, a dictionary of the class: they can register a
    name and have no way to forget one.
    """
    register_attention(name, attend, make_mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def softmax_mask(name: str) -> MakeMask:
    """Return the function that makes masks for the implementation `name`, such as "sdpa".

    Relies on ``AttentionMaskInterface()[name]``: layers that stay softmax get transformers' own
    masks.
    """
    return AttentionMaskInterface()[name]


def softmax_attention(name: str, attention: nn.Module) -> Attend:
    """Return the softmax attention that the module `attention` would call under the implementation
    `name`.

    Relies on ``eager_attention_forward`` in the module's own Python file, which is what every
    family calls for "eager" (some with a softcap or a bias of their own), and on
    ``AttentionInterface().get_interface(name, eager)``.
    """
    eager = sys.modules[type(attention).__module__].__dict__.get("eager_attention_forward")
    return AttentionInterface().get_interface(name, eager)  # type: ignore[arg-type]


def configurations(model: nn.Module) -> list[Any]:
    """List every configuration that a module of `model` reads, each once.

    Relies on modules that attend having the configuration as ``config``.
    """
    held = (getattr(module, "config", None) for module in model.modules())
    return list(
        {id(config): config for config in held if isinstance(config, PretrainedConfig)}.values()
    )


def implementation_of(config: Any) -> str | None:
    """Return the name of the attention implementation that `config` asks for.

    Relies on ``config._attn_implementation``.
    """
    return config._attn_implementation


def set_implementation(configs: Iterable[Any], name: str | None) -> None:
    """Have the modules that read `configs` attend by the implementation `name`.

    Relies on ``config._attn_implementation_internal``: the public ``set_attn_implementation``
    accepts only implementations that it knows to be installed, and checks them for the model.
    """
    for config in configs:
        config._attn_implementation_internal = name


@contextmanager
def use_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let all attentions of `model` use the implementation registered as `name`, for the length of
    a block.

    Relies on what `set_implementation` relies on.
    """
    configs = configurations(model)
    before = [implementation_of(config) for config in configs]
    set_implementation(configs, name)
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            set_implementation([config], old)


def is_tracing(tensor: Tensor) -> bool:
    """Whether a forward pass is being traced or compiled, so that its values must not be asked for.

    Relies on ``utils.import_utils.is_tracing``, which knows every tracer that transformers does.
    """
    return import_utils.is_tracing(tensor)


# attention modules --------------------------------------------------------------------------------


def attach_branch(
    attention: Any, branch: nn.Module, mode: object, before_forward: Callable[..., None]
) -> None:
    """Give a family's attention module what makes it linear, as attributes of ours:

    - ``linear_branch``: the child that owns the new parameters, so that checkpoints, devices,
      dtypes and adapters treat them as the module's own;
    - ``linear_mode``: what the layer does when it is called, a `Mode`;
    - ``linear_memory``: its layer of the cache during one call, else None. `before_forward`, a
      pre-hook of the module, stores it there, since attention functions do not see the cache.

    Relies on attention modules taking the cache as an argument of their ``forward``, and on no
    family using these three names.
    """
    attention.linear_branch = branch
    attention.linear_mode = mode
    attention.linear_memory = None
    attention.register_forward_pre_hook(before_forward, with_kwargs=True)


def attentions_with_branch(model: nn.Module) -> list[Any]:
    """Return the attention modules of `model` that have a branch, in the order of its layers.

    Relies on ``layer_idx``, the layer's number, which attention modules need for the cache.
    """
    found: list[Any] = [module for module in model.modules() if "linear_branch" in module._modules]
    return sorted(found, key=lambda module: module.layer_idx)


def decoder_layers(model: Any) -> list[Any]:
    """Return the layers of a causal model whose modules are named as Llama's.

    Relies on Llama's names of a layer's norms, projections and MLP, and of the trunk around the
    layers; other families that have them may compute something else between them.

    Raises:
        LookupError: If a module of these names is missing.
    """
    layers = list(_named(model, "model.layers"))
    for name in ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"):
        _named(model, name)
    for layer in layers:
        for name in _LLAMA:
            _named(layer, name)
    return layers


_LLAMA = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "mlp.act_fn",
    "post_attention_layernorm",
)


def _named(module: Any, path: str) -> Any:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise LookupError(f"no {path}") from error


def hide_positions(attention: Any) -> None:
    """Let an attention module compute without rotary positions: they turn nothing.

    Relies on ``position_embeddings``, the cosines and sines that a family's model hands to its
    attentions by name, and on its multiplying q and k by them.

    Raises:
        LookupError: If the module takes no such argument.
    """
    if "position_embeddings" not in signature(type(attention).forward).parameters:
        raise LookupError(f"a {type(attention).__name__} takes no position_embeddings")
    attention.register_forward_pre_hook(_turn_nothing, with_kwargs=True)


def _turn_nothing(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cosines, sines = kwargs["position_embeddings"]
    still = torch.ones_like(cosines), torch.zeros_like(sines)
    return args, {**kwargs, "position_embeddings": still}


def position_ids_among(options: Mapping[str, Any]) -> Tensor | None:
    """Return the positions ``[b t]`` or ``[1 t]`` among the options of an attention function; None
    if there are none.

    Relies on attentions that rotate handing ``position_ids`` on.
    """
    return options.get("position_ids")


def execution_device(attention: nn.Module) -> torch.device:
    """Return the device on which an attention module computes.

    Relies on ``_hf_hook.execution_device``, which accelerate leaves on a module whose weights it
    has put elsewhere: they are on the meta device between two calls.
    """
    hooks = [
        part.__dict__["_hf_hook"] for part in attention.modules() if "_hf_hook" in part.__dict__
    ]
    return torch.device(hooks[0].execution_device) if hooks else next(attention.parameters()).device


@contextmanager
def skip_blocks(blocks: Iterable[Any]) -> Iterator[None]:
    """Let these blocks of a model return their input hidden states, for the length of a block.

    Relies on a block taking the hidden states first and returning them alone, as a tensor; replaces
    ``forward`` on the instances, where accelerate may have put one of its own.
    """
    with _other_forward(blocks, lambda hidden, *_, **__: hidden):
        yield


@contextmanager
def _other_forward(modules: Iterable[Any], forward: Callable[..., Any]) -> Iterator[None]:
    modules = list(modules)
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            del module.forward
            if old is not None:
                module.forward = old


# final states -------------------------------------------------------------------------------------


def has_final_states(model: PreTrainedModel) -> bool:
    """Whether `logits_of_states` can compute the logits of `model`.

    Relies on a family's ``forward`` calling its ``base_model`` by the name in
    ``base_model_prefix``; OPT's calls a part of it.
    """
    return f"self.{model.base_model_prefix}(" in getsource(type(model).forward)


def logits_of_states(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Compute the logits of final hidden states ``[b t d]``, which ``base_model`` returned.

    Relies on the ``forward`` of a model with a head computing logits from the
    ``last_hidden_state`` of its ``base_model`` alone: scaled or capped, as its family has it.
    """
    given = _GivenStates(last_hidden_state=states)
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    with _other_forward([model.base_model], lambda *_, **__: given):
        return model(input_ids=ids, use_cache=False).logits


@dataclass
class _GivenStates(BaseModelOutputWithPast):
    """Final hidden states, and None for all else that a family's base returns."""

    def __getattr__(self, name: str) -> None:
        return None


# the cache ----------------------------------------------------------------------------------------


def caches_among(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Cache]:
    """Return the caches among a module's arguments.

    Relies on the cache being an argument of its own, whatever its name: families differ in it.
    """
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]


def cache_layer_names(config: PretrainedConfig) -> list[str]:
    """Return, for every layer of a model, the name of the class in which transformers keeps its
    cache.

    A layer that keeps more or less than its own keys and values cannot keep a state instead. Relies
    on ``DynamicCache(config=…).layers`` being made at once, one for each layer.
    """
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return [type(layer).__name__ for layer in layers]


def cache_layer(cache: DynamicCache, index: int) -> Any:
    """Return the layer `index` of `cache`, which is added if there are fewer.

    Relies on ``layers``, a list, and on ``layer_class_to_replicate``, which a cache without a
    configuration appends for a layer that it has not seen.
    """
    layers: list[Any] = cache.layers
    while len(layers) <= index:
        layers.append(cache.layer_class_to_replicate())  # type: ignore[misc]
    return layers[index]


def replace_cache_layer(cache: DynamicCache, index: int, layer: Any) -> None:
    """Replace the layer `index` of `cache`.

    Relies on ``layers`` being a list whose items are used only through ``CacheLayerMixin``'s
    methods.
    """
    cache.layers[index] = layer


# classes and checkpoints --------------------------------------------------------------------------


class OwnInitialization(PreTrainedModel):
    """A model that initialises some of its modules itself, where a checkpoint lacks their weights.

    Relies on ``PreTrainedModel._init_weights(module)``, which loading calls for every module with
    missing weights, on the innermost model that holds it.
    """

    def initialize(self, module: nn.Module) -> bool:
        """Initialise `module` and return True, or return False to leave it to the family."""
        raise NotImplementedError

    def _init_weights(self, module: nn.Module) -> None:
        if not self.initialize(module):
            super()._init_weights(module)


class OwnCachePolicy(PreTrainedModel):
    """A model that says which caches `generate` may make for it, and prepares them.

    Relies on ``_is_stateful``, by which `generate` refuses what would take tokens back (assisted
    generation), on ``_prepare_cache_for_generation``, which makes the cache, and on
    ``activate_past_recording`` and ``is_assistant``, by which a cache learns that it will have to.
    """

    _is_stateful = False

    def require_cache(self, implementation: str | None) -> None:
        """Check that `generate` may use this ``cache_implementation``, and raise an error if
        not."""
        raise NotImplementedError

    def prepare_cache(self, cache: Cache) -> None:
        """Put the layers in `cache` that this model keeps its states in."""
        raise NotImplementedError

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.require_cache(generation_config.cache_implementation)
        if generation_config.prefill_chunk_size and continuation_of(self).most < inf:
            generation_config.prefill_chunk_size = None
        parent: Any = super()
        parent._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE)
        if cache is not None:
            self.prepare_cache(cache)
            if generation_config.is_assistant:
                cache.activate_past_recording()


def change_class(instance: Any, made: type) -> None:
    """Change the class of `instance`, a model, one of its layers or a configuration, to `made`, a
    subclass of its own, or back.

    Relies on Python letting ``__class__`` be assigned where both classes have the same layout: a
    model of billions of weights is not built a second time to get another type.
    """
    instance.__class__ = made


def make_class(name: str, bases: tuple[type, ...], members: dict[str, Any], module: str) -> Any:
    """Create a class called `name` that pickle finds in the Python file `module`.

    Relies on pickle looking a class up by the names of its module and of itself. In another process
    the file's own ``__getattr__`` creates it again.
    """
    made = type(name, bases, {**members, "__module__": module})
    setattr(sys.modules[module], name, made)
    return made


def float32_children(base: type[PreTrainedModel], *names: str) -> dict[str, Any]:
    """Return members for a subclass of `base` that keep its children `names` in float32.

    They stay so when a checkpoint is loaded in half precision. Relies on
    ``_keep_in_fp32_modules_strict``, a set of names or None.
    """
    return {"_keep_in_fp32_modules_strict": {*names, *(base._keep_in_fp32_modules_strict or ())}}


def convert_checkpoints_alike(made: str, base: str) -> None:
    """Let checkpoints of the type or class `made` name and stack their weights (of experts, say) as
    `base` does.

    Relies on ``conversion_mapping``, where transformers looks up by type and by class how the names
    in a checkpoint become those of the model.
    """
    mapping = get_checkpoint_conversion_mapping(base)
    if mapping is not None:
        register_checkpoint_conversion_mapping(made, mapping, overwrite=True)


def transformers_class(name: str) -> type | None:
    """Return a class of transformers by its name, imported now; None if there is none.

    Relies on ``transformers.<name>`` importing a family's file when its class is first asked for.
    """
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) else None


def language_model_types() -> list[str]:
    """List every model type of transformers' own that has a causal language model.

    Relies on the tables ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES``, where ours are entered, too, and
    ``CONFIG_MAPPING_NAMES`` of the automatic classes.
    """
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES]


def configuration_class(model_type: str) -> type[PretrainedConfig]:
    """Return the class of the configurations of a type, imported now.

    Relies on the table ``CONFIG_MAPPING``.
    """
    return CONFIG_MAPPING[model_type]


def automatic_classes(config: type[PretrainedConfig]) -> dict[Any, type[PreTrainedModel]]:
    """Return the class of models, imported now, that each automatic class has for a class of
    configurations; those that have none are left out.

    Relies on the automatic classes' tables, whose values are a class, or several, of which the
    first is the usual one.
    """
    found = {automatic: table.get(config, ()) for automatic, table in AUTOMATIC_CLASSES.items()}
    several = {
        automatic: models if isinstance(models, tuple) else (models,)
        for automatic, models in found.items()
    }
    return {automatic: models[0] for automatic, models in several.items() if models}


def register_configuration(model_type: str, made: Any) -> None:
    """Have ``AutoConfig`` read configurations of `model_type` by ``made.from_dict``.

    Relies on ``AutoConfig`` calling nothing but ``from_dict`` of what is registered, which need not
    be a configuration: a stand-in costs no import until a checkpoint asks for it.
    """
    AutoConfig.register(model_type, made, exist_ok=True)
