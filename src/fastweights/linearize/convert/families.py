"""`linearized_<type>` for every type of causal language model: classes made when they are
needed.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastweights.linearize.convert.analog import LinearAttentionConfig
from fastweights.linearize.convert.attention import (
    SOFTMAX,
    attach_branch,
    implementation_name,
)
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.sites import (
    AttentionLayer,
    configurations,
    set_implementation,
)

PREFIX = "linearized_"


class LinearizedPart(PreTrainedModel):
    """Any model inside a linearized one: it is asked for the start of weights that a checkpoint
    lacks.
    """

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LinearBranch):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class LinearizedModel(LinearizedPart):
    """A causal language model with `linear_branch` children, as its configuration's `linearize`
    says.
    """

    _is_stateful = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        settings = config.linearize
        install_branches(
            self,
            [AttentionLayer(**site) for site in settings["sites"]],
            LinearAttentionConfig(**settings["analog"]),
        )

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any
    ) -> None:
        """Which implementation the softmax layers and the teacher use: sdpa or eager."""
        use_softmax(self, str(attn_implementation))

    def _prepare_cache_for_generation(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise CannotLinearize(
                f"cache_implementation={wanted!r}",
                "a linearized layer keeps a state of constant size instead of keys and values",
                "leave it out",
            )
        parent: Any = super()
        return parent._prepare_cache_for_generation(generation_config, *args, **kwargs)


def install_branches(
    model: PreTrainedModel, sites: list[AttentionLayer], analog: LinearAttentionConfig
) -> None:
    """Branches, hooks and the attention implementation, for the sites to convert."""
    softmax = model.config._attn_implementation
    for site in sites:
        module = model.get_submodule(site.path)
        attach_branch(module, analog.branch(site).to(_device(module)))
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not isinstance(part, LinearizedPart):
            part.__class__ = part_class(type(part))
    use_softmax(model, softmax)


def _device(module: nn.Module) -> torch.device:
    """Where an attention computes: weights that accelerate has put elsewhere are on the meta device
    meanwhile.
    """
    hooks = [part.__dict__["_hf_hook"] for part in module.modules() if "_hf_hook" in part.__dict__]
    return torch.device(hooks[0].execution_device) if hooks else next(module.parameters()).device


def use_softmax(model: PreTrainedModel, name: str | None) -> None:
    """Have the softmax layers of a linearized model use the implementation `name`."""
    set_implementation(configurations(model), implementation_name(validate_softmax_name(name)))


def validate_softmax_name(name: str | None) -> str:
    """`name` without our prefix, or a CannotLinearize."""
    name = str(name).removeprefix(PREFIX)
    if name not in SOFTMAX:
        raise CannotLinearize(
            f"attn_implementation={name!r}",
            "softmax layers beside linear ones go through sdpa or eager",
            "load the model with attn_implementation='sdpa', which takes the fused kernels"
            " there are",
        )
    return name


@cache
def config_class(base: type[PretrainedConfig]) -> Any:
    """``Linearized<Base>``, whose model type makes sure that nothing loads its checkpoints as
    softmax models.
    """
    made = _make_class(base, (base,), {"model_type": PREFIX + base.model_type})
    _convert_alike(made.model_type, base.model_type)
    AutoConfig.register(made.model_type, made, exist_ok=True)
    return made


@cache
def model_class(base: type[PreTrainedModel]) -> Any:
    """``Linearized<Base>``, known to AutoModelForCausalLM."""
    config = config_class(base.config_class)  # type: ignore[arg-type]
    strict = {"linear_branch", *(base._keep_in_fp32_modules_strict or ())}
    made = _make_class(
        base,
        (LinearizedModel, base),
        {"config_class": config, "_keep_in_fp32_modules_strict": strict},
    )
    AutoModelForCausalLM.register(config, made, exist_ok=True)
    return made


@cache
def part_class(base: type[PreTrainedModel]) -> Any:
    """``Linearized<Base>`` of a model inside one."""
    return _make_class(base, (LinearizedPart, base), {})


def _make_class(base: type, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    """A class that pickle finds in this module, here and through `__getattr__` in another
    process.
    """
    made = type(f"Linearized{base.__name__}", bases, {**members, "__module__": __name__})
    setattr(sys.modules[__name__], made.__name__, made)
    _convert_alike(made.__name__, base.__name__)
    return made


def _convert_alike(made: str, base: str) -> None:
    """Checkpoints name and stack weights (experts, say) as those of the model type or class `base`
    do.
    """
    mapping = get_checkpoint_conversion_mapping(base)
    if mapping is not None:
        register_checkpoint_conversion_mapping(made, mapping, overwrite=True)


def __getattr__(name: str) -> Any:
    base = (
        getattr(transformers, name.removeprefix("Linearized"), None)
        if name.startswith("Linearized")
        else None
    )
    if not isinstance(base, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(base, PretrainedConfig):
        return config_class(base)
    return model_class(base) if base.__name__.endswith("ForCausalLM") else part_class(base)


class _Family:
    """Stands for ``linearized_<base>`` in transformers' table until a checkpoint of it is read."""

    base: ClassVar[str]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PretrainedConfig:
        config: Any = CONFIG_MAPPING[cls.base]
        model_class(getattr(transformers, _first(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.base])))
        return config_class(config).from_dict(config_dict, **kwargs)


def _first(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]


for _base in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
    AutoConfig.register(PREFIX + _base, type("_Family", (_Family,), {"base": _base}), exist_ok=True)
