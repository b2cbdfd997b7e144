"""``linearized_<type>`` for every type of causal language model, for transformers' automatic
classes.

A stand-in for each of some two hundred types takes three milliseconds and imports no family; the
first checkpoint of a type makes its classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from fastweights.linearize.convert.implementations import PREFIX
from fastweights.linearize.convert.model_classes import register_family
from fastweights.linearize.convert.transformers_seams import (
    configuration_class,
    language_model_types,
    register_configuration,
)


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
