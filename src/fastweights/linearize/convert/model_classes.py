"""The classes ``Linearized<Class>`` of every family of models, created when they are needed."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fastweights.linearize.convert.attention import install_branches
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import ensure_state_layer
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.implementations import PREFIX, softmax_name, use_softmax
from fastweights.linearize.convert.transformers_seams import (
    OwnCachePolicy,
    OwnInitialization,
    attentions_with_branch,
    change_class,
    convert_checkpoints_alike,
    float32_children,
    implementation_of,
    make_class,
    register_configuration,
    register_language_model,
    transformers_class,
)


class LinearizedPart(OwnInitialization):
    """Any model inside a linearized one; it initialises the branches that a checkpoint lacks."""

    def initialize(self, module: nn.Module) -> bool:
        if isinstance(module, LinearBranch):
            module.reset_parameters()
            return True
        return False


class LinearizedModel(LinearizedPart, OwnCachePolicy):
    """A causal language model some of whose attentions are linear.

    Its configuration's ``linearize`` says which and how: ``{"analog": …, "sites": […]}``, a
    `LinearAttentionConfig` and a list of `AttentionLayer`, under the keys of the first version.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        attentions = [AttentionLayer(**stored) for stored in config.linearize["sites"]]
        install_branches(self, attentions, LinearAttentionConfig(**config.linearize["analog"]))
        convert_parts(self)
        use_softmax(self, softmax_name(implementation_of(config)))

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any
    ) -> None:
        """Choose the implementation of the softmax layers and the teacher: "sdpa" or "eager"."""
        use_softmax(self, softmax_name(str(attn_implementation)))

    def require_cache(self, implementation: str | None) -> None:
        if implementation not in (None, "dynamic"):
            raise CannotLinearize(
                f"cache_implementation={implementation!r}",
                "a linearized layer keeps a state of constant size instead of keys and values",
                "leave it out",
            )

    def prepare_cache(self, cache: Any) -> None:
        for layer in attentions_with_branch(self):
            if layer.linear_mode.constant:
                ensure_state_layer(cache, layer.layer_idx)


def convert_model(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Change a model, its parts and its configuration, in place, to their linearized classes."""
    config: Any = model.config
    made = model_class(type(model))
    change_class(config, config_class(type(config)))
    config.linearize = settings
    change_class(model, made)
    convert_parts(model)


def convert_parts(model: PreTrainedModel) -> None:
    """Change the models inside a linearized one, in place, to `LinearizedPart`s."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not isinstance(part, LinearizedPart):
            change_class(part, part_class(type(part)))


@cache
def config_class(base: type[PretrainedConfig]) -> Any:
    """Return the configuration class ``Linearized<Base>``.

    Its model type makes sure that nothing loads its checkpoints as softmax models.
    """
    made = _subclass(base, (base,), {"model_type": PREFIX + base.model_type})
    convert_checkpoints_alike(made.model_type, base.model_type)
    register_configuration(made.model_type, made)
    return made


@cache
def model_class(base: type[PreTrainedModel]) -> Any:
    """Return the model class ``Linearized<Base>``, registered with AutoModelForCausalLM."""
    config = config_class(base.config_class)  # type: ignore[arg-type]
    members = {"config_class": config, **float32_children(base, "linear_branch")}
    made = _subclass(base, (LinearizedModel, base), members)
    register_language_model(config, made)
    return made


@cache
def part_class(base: type[PreTrainedModel]) -> Any:
    """Return the class ``Linearized<Base>`` of a model inside a linearized one."""
    return _subclass(base, (LinearizedPart, base), {})


def _subclass(base: type, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    made = make_class(f"Linearized{base.__name__}", bases, members, __name__)
    convert_checkpoints_alike(made.__name__, base.__name__)
    return made


def __getattr__(name: str) -> Any:
    """The class that a pickle of another process names."""
    known = name.startswith("Linearized")
    base = transformers_class(name.removeprefix("Linearized")) if known else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(base, PretrainedConfig):
        return config_class(base)
    return model_class(base) if base.__name__.endswith("ForCausalLM") else part_class(base)
