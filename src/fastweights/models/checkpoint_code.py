"""The file of imports that a checkpoint carries for programs that do not import fastweights.

transformers reads its name in config.json (``auto_map``) and runs it where the caller says
``trust_remote_code=True``. Once fastweights is imported, its registered classes win, and the file
is never run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CODE = Path(__file__).with_name("modeling_fastweights.py")
AUTOMATIC_CLASSES: Mapping[Any, Any] = {
    AutoModel: MODEL_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForImageClassification: MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
"""The automatic classes that know models of ours, and their tables of models by configuration."""


class CarriesCode(PretrainedConfig):
    """A configuration whose checkpoints name and carry the code that loads them."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the configuration as transformers does, and beside it the file of imports."""
        if self._is_ours():
            self.auto_map = code_map(type(self)) | getattr(self, "auto_map", {})
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            Path(save_directory, CODE.name).write_bytes(CODE.read_bytes())
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Have checkpoints carry the Python file of this class, if it is not one of fastweights.

        transformers asks for this of every class that a checkpoint's code names.
        """
        if not cls._is_ours():
            super().register_for_auto_class(auto_class)

    @classmethod
    def _is_ours(cls) -> bool:
        return cls.__module__.startswith("fastweights.")


def code_map(config: type[PretrainedConfig]) -> dict[str, str]:
    """The names of the classes in the file of imports, by those of the automatic classes."""
    models = {automatic: table.get(config, None) for automatic, table in AUTOMATIC_CLASSES.items()}
    classes = {"AutoConfig": config} | {
        automatic.__name__: model for automatic, model in models.items() if model is not None
    }
    module = CODE.name.removesuffix(".py")
    return {name: f"{module}.{found.__name__}" for name, found in classes.items()}


def register_models(config: type[PretrainedConfig], models: Mapping[Any, Any]) -> None:
    """Let automatic classes, and programs that look models up in transformers, find these.

    Among them is Trainer, which smooths labels of the next token where a causal language model's
    class is in transformers' table of their names.

    Args:
        config: The models' class of configurations.
        models: A class of models for each automatic class.
    """
    for automatic, model in models.items():
        automatic.register(config, model, exist_ok=True)
        if automatic is AutoModelForCausalLM:
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__
        for module in _modules_called_transformers():
            setattr(module, model.__name__, model)


def _modules_called_transformers() -> list[ModuleType]:
    """The module transformers, and the one before it that files of transformers may still hold:
    its processing_utils.py replaces the module when it is imported.
    """
    files = [file for name, file in sys.modules.items() if name.startswith("transformers.")]
    held = [vars(file).get("transformers") for file in files]
    return [transformers, *(module for module in held if isinstance(module, ModuleType))]
