"""The classes ``Linearized<Class>`` of every family of models, created when they are needed."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from fastweights.features import Landmarks
from fastweights.linearize.convert.attention import install_branches
from fastweights.linearize.convert.attention_layers import (
    PREFIX,
    AttentionLayer,
    CannotLinearize,
    softmax_name,
    use_softmax,
)
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import ensure_state_layer
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.native_step import LinearizedStep
from fastweights.linearize.convert.transformers_seams import (
    OwnCachePolicy,
    OwnInitialization,
    attentions_with_branch,
    automatic_classes,
    change_class,
    configuration_class,
    convert_checkpoints_alike,
    float32_children,
    implementation_of,
    language_model_types,
    make_class,
    register_configuration,
    transformers_class,
)
from fastweights.models.cache_names import GeneratesByEitherName, rename_cache
from fastweights.models.checkpoint_code import CarriesCode, register_models
from fastweights.models.continuous import BatchesAtOnce
from fastweights.models.token_reader import GeneratesNatively, register_step


class LinearizedConfig(CarriesCode):
    """A configuration of a linearized model.

    Attributes:
        softmax_class: The class of the configurations of the softmax model.
        linearize: What was linearized, and how (see `LinearizedModel`).
    """

    softmax_class: ClassVar[type[PretrainedConfig]]

    @classmethod
    def from_pretrained(cls, source: Any, **kwargs: Any) -> Any:
        """Read the configuration of a linearized model, or of the softmax model it was made from,
        which adapters of a model that is linearized in memory refer to.
        """
        kind = cls.get_config_dict(source, **kwargs)[0].get("model_type")
        if kind == cls.softmax_class.model_type:
            return cls.softmax_class.from_pretrained(source, **kwargs)
        return super().from_pretrained(source, **kwargs)


class LinearizedPart(OwnInitialization):
    """Any model inside a linearized one; it initialises the branches that a checkpoint lacks."""

    def initialize(self, module: nn.Module) -> bool:
        # landmarks of checkpoints that do not say how positions turn read what is turned
        if isinstance(module, LinearBranch | Landmarks):
            module.reset_parameters()
            return True
        return False


class LinearizedModel(BatchesAtOnce, LinearizedPart, OwnCachePolicy):
    """A model some of whose attentions are linear, with any head or none.

    Its configuration's ``linearize`` says which and how: ``{"analog": …, "sites": […]}``, a
    `LinearAttentionConfig` and a list of `AttentionLayer`, under the keys of the first version.

    Attributes:
        trained_beside_adapters: Names of modules that are trained whole where others get adapters.
    """

    trained_beside_adapters = ("linear_branch",)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        attentions = [AttentionLayer(**stored) for stored in config.linearize["sites"]]
        analog = LinearAttentionConfig.from_stored(config.linearize["analog"])
        install_branches(self, attentions, analog)
        convert_parts(self)
        use_softmax(self, softmax_name(implementation_of(config)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with a cache by either of transformers' names for it."""
        return super().__call__(*args, **rename_cache(kwargs))

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any
    ) -> None:
        """Choose the implementation of the softmax layers and the teacher: "sdpa" or "eager"."""
        use_softmax(self, softmax_name(str(attn_implementation)))

    @PreTrainedModel.loss_function.getter
    def loss_function(self) -> Any:
        """The loss of the model's head, which of next tokens is 0, not 0 / 0, where none is
        learnt."""
        given = PreTrainedModel.loss_function.fget(self)  # pyrefly: ignore[not-callable]
        return _next_token_loss if given is ForCausalLMLoss else given

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


register_step(LinearizedModel, LinearizedStep)


def _next_token_loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    loss, shifted = ForCausalLMLoss(logits, labels, *args, **kwargs), kwargs.get("shift_labels")
    learnt = (labels[..., 1:] if shifted is None else shifted) != kwargs.get("ignore_index", -100)
    return loss.where(learnt.any().to(loss.device), 0)


def convert_model(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Change a model, its parts and its configuration, in place, to their linearized classes."""
    config: Any = model.config
    change_class(config, register_family(type(config)))
    vars(config).pop("model_type", None)  # of the checkpoint, before that of the class
    config.linearize = settings
    change_class(model, model_class(type(model)))
    convert_parts(model)


def convert_parts(model: PreTrainedModel) -> None:
    """Change the models inside a linearized one, in place, to their linearized classes."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not isinstance(part, LinearizedPart):
            change_class(part, _model_or_part_class(type(part)))


@cache
def register_family(base: type[PretrainedConfig]) -> Any:
    """Let the automatic classes know ``Linearized<Base>`` and its models, and return it."""
    for automatic, model in automatic_classes(base).items():
        made = model_class(model)
        register_models(made.config_class, {automatic: made})
    return config_class(base)


@cache
def config_class(base: type[PretrainedConfig]) -> Any:
    """Return the configuration class ``Linearized<Base>``.

    Its model type makes sure that nothing loads its checkpoints as softmax models.
    """
    members = {"model_type": PREFIX + base.model_type, "softmax_class": base}
    made = _subclass(base, (LinearizedConfig, base), members)
    convert_checkpoints_alike(made.model_type, base.model_type)
    register_configuration(made.model_type, made)
    return made


@cache
def model_class(base: type[PreTrainedModel]) -> Any:
    """Return the model class ``Linearized<Base>``."""
    config = config_class(base.config_class)  # type: ignore[arg-type]
    members = {"config_class": config, **float32_children(base, "linear_branch")}
    names = (GeneratesByEitherName, GeneratesNatively) if issubclass(base, GenerationMixin) else ()
    return _subclass(base, (*names, LinearizedModel, base), members)


@cache
def part_class(base: type[PreTrainedModel]) -> Any:
    """Return the class ``Linearized<Base>`` of a model that only occurs inside a linearized one."""
    return _subclass(base, (LinearizedPart, base), {})


def _model_or_part_class(base: type[PreTrainedModel]) -> Any:
    known = automatic_classes(base.config_class).values()  # type: ignore[arg-type]
    return model_class(base) if base in known else part_class(base)


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
        return register_family(base)
    return _model_or_part_class(base)


def register_model_types() -> None:
    """Let transformers' automatic classes read linearized checkpoints of every model type."""
    for base in language_model_types():
        register_configuration(PREFIX + base, type("_ModelType", (_ModelType,), {"base": base}))


class _ModelType:
    """Stands for ``linearized_<base>`` in transformers' table until a checkpoint of it is read."""

    base: ClassVar[str]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PretrainedConfig:
        return register_family(configuration_class(cls.base)).from_dict(config_dict, **kwargs)
