# pyright: reportMissingImports=false
"""What vLLM calls when it starts: it learns the names of our models' classes."""

from __future__ import annotations

HOME = "fastweights.engines.vllm"
"""The package of the classes that vLLM imports when a model needs them."""


def register() -> None:
    """Let vLLM know our models; its entry point ``vllm.general_plugins``.

    vLLM calls it in each of its processes, and may call it again.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import fastweights  # noqa: F401 (transformers' classes know our model types from here on)
    from fastweights.engines.vllm.settings import ServedSettings

    name = "FastWeightsForCausalLM"
    ModelRegistry.register_model(name, f"{HOME}.model:ServedFastWeights")
    MODELS_CONFIG_MAP[name] = ServedSettings
